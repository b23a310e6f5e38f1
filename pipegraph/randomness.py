"""Random numbers keyed by what they belong to, a sample in a stage, and not by the worker that draws them.

The key is a 128-bit BLAKE2b hash of (seed, epoch, lineage, stage): hashed, not added, so that seed 0, epoch 1 differs
from 1, 0. The generator is numpy's Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

What code draws from the global generators of torch, NumPy and Python is keyed alike: see ``global_generators``.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


def digest(*parts: Any) -> bytes:
    """128 bits (BLAKE2b) from any values with a stable ``repr``."""
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def key(*parts: Any) -> int:
    """:func:`digest` as an integer."""
    return int.from_bytes(digest(*parts), "little")


def uniform(*parts: Any) -> float:
    """One number in [0, 1) from its key alone (53 bits)."""
    return (key(*parts) >> 75) / float(1 << 53)


def generator(seed: int, epoch: int, lineage: tuple[Any, ...], stage: str) -> np.random.Generator:
    """The generator of one item in one stage."""
    seeded: Any = _Key(digest(seed, epoch, lineage, stage))  # the stubs know no seed but numpy's own
    return np.random.Generator(_philox()(seeded))


@cache
def _philox() -> type[np.random.Philox]:
    # Not at import: numpy.random takes 5 ms, and many pipelines draw nothing.
    np.random.bit_generator.ISpawnableSeedSequence.register(_Key)
    return np.random.Philox


class _Key:
    """Gives ``Philox`` its key as it is.

    ``Philox(key=...)`` does so too, but first draws a seed from the system that it does not use: twice the time.
    ``Generator.spawn`` works, and its children are keyed by their number.
    """

    def __init__(self, digest: bytes) -> None:
        self._digest = digest
        self._children = 0

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> npt.NDArray[Any]:
        if n_words == 2 and dtype is np.uint64:
            return np.frombuffer(self._digest, "<u8")
        entropy = int.from_bytes(self._digest, "little")
        return np.random.SeedSequence(entropy).generate_state(n_words, dtype)

    def spawn(self, n_children: int) -> list[_Key]:
        first = self._children
        self._children += n_children
        return [_Key(digest(self._digest, number)) for number in range(first, self._children)]
