"""Seeds of replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from pipegraph.device import Backend


def replica_seed(seed: int, call: int, replica: int) -> int:
    """The seed of a replica in the executor's `call`-th call (counted from 0), for ``deterministic=True``.

    numpy's ``SeedSequence`` over the three numbers, so that neighbours are unrelated.
    """
    words = np.random.SeedSequence([seed & (2**64 - 1), call, replica]).generate_state(2, np.uint32)
    return int(words[0]) << 31 ^ int(words[1])


@contextmanager
def forked_seed(seed: int, backends: Iterable[Backend]) -> Iterator[None]:
    """All generators are seeded inside, and as before when it ends. One thread at a time."""
    before = [(backend, backend.random_state()) for backend in backends]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            yield
        finally:
            for backend, state in before:
                backend.set_random_state(state)
