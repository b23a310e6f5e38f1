"""Counter-based random numbers keyed by what a sample is, never by who works on it.

The key is a 128-bit BLAKE2b hash of (seed, epoch, lineage, stage); the generator is numpy's
Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Hashed, not
added: ``(seed=0, epoch=1)`` and ``(1, 0)`` differ.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np


def key(*parts: Any) -> int:
    """A 128-bit integer from any values with a stable ``repr``."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=16).digest(), "little")


def generator(seed: int, epoch: int, lineage: tuple[Any, ...], stage: str) -> np.random.Generator:
    """The generator of one item in one stage."""
    return np.random.Generator(np.random.Philox(key=key(seed, epoch, lineage, stage)))


def uniform(*parts: Any) -> float:
    """One number in [0, 1) from its key alone (53 bits)."""
    return (key(*parts) >> 75) / float(1 << 53)
