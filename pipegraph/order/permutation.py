"""Keyed permutations: a table for small domains, a Feistel network above.

Keys are hashed from what they belong to (seed, epoch, lane ...), never added:
``(seed=0, epoch=1)`` and ``(1, 0)`` have nothing in common.

Sources: the network over halves of unequal width, each in turn changed by a
function of the other, is the alternating Feistel network, and walking the cycle
until the value falls into the domain keeps it a bijection (Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002). The mixing function is the
finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import numpy as np

from pipegraph.forks import lock_free_after_fork
from pipegraph.order.layout import Int64Array
from pipegraph.randomness import key as hashed_key

T = TypeVar("T")


class BoundedMemo(Generic[T]):
    """Least recently used values, bounded by bytes; thread-safe.

    The last two values are kept whatever their size: the running epoch's, and
    that of the next one, which prefetching draws at the same time. Computing
    happens outside the lock; of two threads that miss the same key at once
    both compute, and the first result is kept.

    Args:
        max_bytes: the bytes that values beyond the last two may fill.
        size_of: the bytes that one value holds.
    """

    def __init__(self, max_bytes: int, size_of: Callable[[T], int]) -> None:
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._lock = lock_free_after_fork()
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._held = 0

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The value under ``key``, computed if it is not there."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = compute()
        with self._lock:
            if key in self._values:
                return self._values[key]
            self._values[key] = value
            self._held += self._size_of(value)
            while len(self._values) > 2 and self._held > self._max_bytes:
                _, dropped = self._values.popitem(last=False)
                self._held -= self._size_of(dropped)
        return value


if TYPE_CHECKING:
    import numpy.typing as npt

UInt64Array: TypeAlias = "npt.NDArray[np.uint64]"

# Up to here a permutation is a table (8 KiB): cheap to make, and exactly uniform,
# where a network over a few bits reaches only some of the permutations.
TABLE_SIZE = 1_024

# Eight rounds, each half four times. tests/order/test_permutation.py measures
# the uniformity of places and of pairs for domains just above TABLE_SIZE.
ROUNDS = 8

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_tables: BoundedMemo[Int64Array] = BoundedMemo(16 << 20, lambda table: table.nbytes)


def key64(*parts: int | str) -> int:
    """A key of 64 bits, hashed from integers and strings."""
    return hashed_key("order", *(part if isinstance(part, str) else int(part) for part in parts)) % 2**64


def mix(values: UInt64Array) -> UInt64Array:
    """SplitMix64's finaliser: a bijection of 64-bit integers without visible structure."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def derived_keys(key: int, *numbers: Int64Array) -> UInt64Array:
    """One key per element, hashed from a key and arrays of numbers of one shape."""
    keys = np.full(numbers[0].shape, key, dtype=np.uint64)
    for array in numbers:
        keys = mix(keys + (array.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return keys


def shuffled(size: int, key: int) -> Int64Array:
    """The numbers 0..size-1 in an order fixed by the key, int64 (size,).

    Fisher-Yates of ``RandomState`` over Philox: numpy promises never to change
    either stream, so the order holds across versions and machines.
    """
    return np.random.RandomState(np.random.Philox(key=key)).permutation(size).astype(np.int64, copy=False)


def permute(values: Int64Array, sizes: Int64Array, keys: UInt64Array) -> Int64Array:
    """Each value's image under the permutation of 0..size-1 that its key names.

    Args:
        values, sizes, keys: int64, int64 and uint64 of one shape (k,), with
            0 <= value < size < 2**53. Equal (size, key) pairs are one permutation.
    """
    small = sizes <= TABLE_SIZE
    if not small.any():
        return _feistel(values, sizes, keys)
    images = np.empty_like(values)
    images[~small] = _feistel(values[~small], sizes[~small], keys[~small])
    images[small] = _look_up(values[small], sizes[small], keys[small])
    return images


def permute_one(values: Int64Array, size: int, key: int) -> Int64Array:
    """``permute`` where all values lie in one domain under one key."""
    shape = values.shape
    return permute(values, np.full(shape, size, np.int64), np.full(shape, key, np.uint64))


def _look_up(values: Int64Array, sizes: Int64Array, keys: UInt64Array) -> Int64Array:
    # Runs of one permutation are looked up together: neighbours share windows.
    by_key = np.lexsort((sizes, keys))
    keys, sizes, values = keys[by_key], sizes[by_key], values[by_key]
    starts = np.flatnonzero(
        np.concatenate(([True], (keys[1:] != keys[:-1]) | (sizes[1:] != sizes[:-1])))
    ).tolist()
    images = np.empty_like(values)
    for start, stop in zip(starts, [*starts[1:], len(values)], strict=True):
        size, key = int(sizes[start]), int(keys[start])
        table = _tables.get((size, key), lambda size=size, key=key: shuffled(size, key))  # type: ignore[misc]
        images[by_key[start:stop]] = table[values[start:stop]]
    return images


def _feistel(values: Int64Array, sizes: Int64Array, keys: UInt64Array) -> Int64Array:
    # frexp's exponent of n - 1 is its bit length, exactly so below 2**53.
    bits = np.frexp((sizes - 1).astype(np.float64))[1].astype(np.uint64)
    images = _network(values.astype(np.uint64), bits, keys)
    limits = sizes.astype(np.uint64)
    # The network's domain is below twice the size: each walk ends with a chance above one half.
    outside = np.flatnonzero(images >= limits)
    while outside.size:
        images[outside] = _network(images[outside], bits[outside], keys[outside])
        outside = outside[images[outside] >= limits[outside]]
    return images.astype(np.int64)


def _network(values: UInt64Array, bits: UInt64Array, keys: UInt64Array) -> UInt64Array:
    """One pass over 0..2**bits-1, elementwise; bits >= 2."""
    low_bits = bits >> np.uint64(1)
    high_bits = bits - low_bits
    high, low = values >> low_bits, values & ((np.uint64(1) << low_bits) - np.uint64(1))
    for turn in range(0, ROUNDS, 2):
        high ^= _round(low, turn, keys) >> (np.uint64(64) - high_bits)
        low ^= _round(high, turn + 1, keys) >> (np.uint64(64) - low_bits)
    joined: UInt64Array = (high << low_bits) | low
    return joined


def _round(half: UInt64Array, turn: int, keys: UInt64Array) -> UInt64Array:
    return mix(keys + (half * np.uint64(ROUNDS) + np.uint64(turn + 1)) * _GOLDEN)
