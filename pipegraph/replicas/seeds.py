"""Seeds of replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")


def replica_seed(seed: int, call: int, replica: int) -> int:
    """The seed of a replica in the executor's `call`-th call (counted from 0), for ``deterministic=True``.

    numpy's ``SeedSequence`` over the three numbers, so that neighbours are unrelated.
    """
    words = np.random.SeedSequence([seed & (2**64 - 1), call, replica]).generate_state(2, np.uint32)
    return int(words[0]) << 31 ^ int(words[1])


def forked_seed(job: Callable[[], T], seed: int, devices: Sequence[torch.device]) -> Callable[[], T]:
    """`job` with all generators seeded, which are as before when it ends. One such job at a time."""
    indices = [device.index for device in devices if device.type == "cuda"]

    def run() -> T:
        with torch.random.fork_rng(devices=indices):
            torch.manual_seed(seed)
            return job()

    return run
