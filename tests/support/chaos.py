"""Adversarial scheduling for tests: late streams and poisoned memory.

A stream may lawfully run its work at any time up to the moment when somebody
waits for it. Code with a missing wait is right on an eager stream most of the
time. Under :class:`Chaos` a CPU stream *holds* a seeded share of its work until
a wait demands it, so the code sees the latest lawful moment; and memory that
nobody may read is filled with NaN or 0xAB, so that a wrong read is a wrong
number. No clock is involved.
"""

from __future__ import annotations

import random
import threading

import torch

POISON_BYTE = 0xAB


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN (floating and complex) or with bytes 0xAB (everything else)."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            tensor.view(torch.uint8).fill_(POISON_BYTE)


class Chaos:
    """A seeded adversary for a CPU backend.

    Args:
        seed: of the draws.
        share: how much of the work is held until demanded, 0 to 1. With 1
            the schedule is exact: everything runs at its latest lawful moment.
    """

    def __init__(self, seed: int, share: float = 0.5) -> None:
        self._random = random.Random(seed)
        self._share = share
        self._lock = threading.Lock()

    def hold(self) -> bool:
        """Whether the next piece of work is held until somebody waits for it."""
        with self._lock:
            return self._random.random() < self._share

    def poison(self, tensor: torch.Tensor) -> None:
        """Make any later read of `tensor` a wrong number."""
        poison(tensor)
