"""Keys of random numbers: hashed, and not added, from what they belong to: seed 0, epoch 1 differs from 1, 0."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any


def digest(*parts: Any) -> bytes:
    """128 bits (BLAKE2b) from any values with a stable ``repr``."""
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def key(*parts: Any) -> int:
    """:func:`digest` as an integer."""
    return int.from_bytes(digest(*parts), "little")


def uniform(*parts: Any) -> float:
    """One number in [0, 1) from its key alone (53 bits)."""
    return (key(*parts) >> 75) / float(1 << 53)
