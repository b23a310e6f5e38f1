"""Whether the user's code hands out one buffer twice, filled anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any
from zlib import crc32

import numpy as np
import torch

from pipegraph.errors import GraphError
from pipegraph.tree import leaves


class Results:
    """The first results of a function or an iterable of the user's, to find a buffer that it fills again for the next
    one. What waits in a queue would get the values of what follows.

    The arrays of each result are compared with those before, which are held until then: ``HELD`` bytes of them.
    """

    CHECKED = 8
    HELD = 16 << 20
    MAX_BYTES = 1 << 16

    def __init__(self, whose: str) -> None:
        self.left = self.CHECKED
        self._whose = whose
        self._before: list[tuple[Any, int]] = []  # arrays of results, and their checksums
        self._room = self.HELD

    def __reduce__(self) -> tuple[Any, ...]:
        return Results, (self._whose,)

    def of(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function, whose results are checked as long as that is due."""
        return function if self.left <= 0 else lambda item: self.check(function(item), item)

    def each(self, items: Iterator[Any]) -> Iterator[Any]:
        """The items, the first of them checked."""
        return chain(map(self.check, islice(items, self.left)), items)

    def check(self, result: Any, item: Any = None) -> Any:
        """Returns the result; what it has of ``item``, from which it was made, does not count.

        Raises:
            GraphError: it lies where one before lies, which has changed.
        """
        if self.left <= 0:
            return result
        self.left -= 1
        arrays = [] if result is item else _arrays(result)
        for kept, checksum in self._before:
            if _checksum(kept) != checksum and any(np.may_share_memory(kept, array) for array in arrays):
                raise GraphError(
                    f"{self._whose} gives the same buffer again with other values, while what it gave before may still "
                    "wait in a queue, where it is not copied: give a new array each time (buffer.copy(), "
                    "tensor.clone())"
                )
        if not self.left:
            self._before = []
        elif arrays:
            given = _arrays(item)
            for array in arrays:
                if array.nbytes <= self._room and not any(np.may_share_memory(array, each) for each in given):
                    self._room -= array.nbytes
                    self._before.append((array, _checksum(array)))
        return result


def _checksum(array: Any) -> int:
    return crc32(array.reshape(-1).view(np.uint8).data[: Results.MAX_BYTES])


def _arrays(data: Any) -> list[Any]:
    """The first contiguous arrays and tensors that ``data`` is, or that its containers hold, as arrays."""
    found = []
    for leaf in leaves(data):
        if isinstance(leaf, torch.Tensor):
            try:
                leaf = leaf.detach().numpy()
            except (RuntimeError, TypeError):  # of a device, of another layout, of no dtype of NumPy's
                continue
        if type(leaf) is np.ndarray and leaf.size and leaf.flags.c_contiguous and not leaf.dtype.hasobject:
            found.append(leaf)
            if len(found) == 64:
                break
    return found
