"""libstdc++'s ``std::shuffle`` of 0..n-1 with ``std::mt19937``, number for number.

The algorithms: ``std::shuffle`` draws two places from one bounded number while the
generator's range allows it (bits/stl_algo.h), and bounded numbers are drawn by
Lemire's multiplication with rejection ("Fast random integer generation in an
interval", ACM TOMACS 2019; bits/uniform_int_dist.h, GCC 11 and later).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipegraph.errors import GraphError
from pipegraph.order.layout import Int64Array

_RANGE = 2**32 - 1
# Raw numbers taken from the generator at once.
_DRAWN = 1 << 12


def shuffled_by_libstdcxx(size: int, seed: int) -> Int64Array:
    """0..size-1 as ``std::shuffle`` with ``std::mt19937(seed)`` leaves them, int64 (size,).

    Args:
        seed: 0 <= seed < 2**32.

    Raises:
        GraphError: ``size`` is 2**32 or more; there the algorithm is another one.
    """
    if size > _RANGE:
        raise GraphError(f"BlockOrder: compat=True takes fewer than 2**32 samples, got {size}. Leave it out.")
    raw = _raw(seed)
    order = list(range(size))
    if size and _RANGE // size >= size:
        first = 1
        if size % 2 == 0:
            other = _below(2, raw)
            order[1], order[other] = order[other], order[1]
            first = 2
        for i in range(first, size, 2):
            # One number below (i + 1) * (i + 2) holds both places.
            place, next_place = divmod(_below((i + 1) * (i + 2), raw), i + 2)
            order[i], order[place] = order[place], order[i]
            order[i + 1], order[next_place] = order[next_place], order[i + 1]
    else:
        for i in range(1, size):
            place = _below(i + 1, raw)
            order[i], order[place] = order[place], order[i]
    return np.array(order, dtype=np.int64)


def _below(bound: int, raw: Iterator[int]) -> int:
    product = next(raw) * bound
    low = product & _RANGE
    if low < bound:
        threshold = (_RANGE + 1 - bound) % bound
        while low < threshold:
            product = next(raw) * bound
            low = product & _RANGE
    return product >> 32


def _raw(seed: int) -> Iterator[int]:
    # numpy's RandomState and std::mt19937 seed the same generator alike.
    generator = np.random.RandomState(seed)
    while True:
        yield from np.frombuffer(generator.bytes(4 * _DRAWN), dtype="<u4").tolist()
