"""Whether the user's code hands out one buffer twice, filled anew.

These are checks of values of any class: one that behaves unlike its class is not checked, and fails nothing.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import Any
from zlib import crc32

import numpy as np
import torch

from pipegraph.errors import GraphError
from pipegraph.tree import leaves

log = logging.getLogger("pipegraph")


class Results:
    """The first results of a function or an iterable of the user's, to find a buffer that it fills again for the next
    one. What waits in a queue would get the values of what follows.

    Each result is compared with those before: ``ARRAYS`` of its arrays, not those behind attributes of objects, which
    may be these objects' own affair. ``HELD`` bytes of them are held until then; for they count in no memory limit,
    others are only looked at as long as somebody else has them, such as the function that fills them again.
    """

    CHECKED = 8
    ARRAYS = 64
    HELD = 1 << 20
    MAX_BYTES = 1 << 16

    def __init__(self, whose: str) -> None:
        self.left = self.CHECKED
        self._whose = whose
        # Arrays and tensors of results, and their checksums.
        self._before: list[tuple[Callable[[], Any], int]] = []
        self._room = self.HELD

    def __reduce__(self) -> tuple[Any, ...]:
        return Results, (self._whose,)

    def of(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function, whose results are checked as long as that is due."""
        if self.left <= 0:
            return function

        def checked(item: Any) -> Any:
            return self.check(function(item), item)

        return checked

    def each(self, items: Iterator[Any]) -> Iterator[Any]:
        """The items, the first of them checked."""
        while self.left > 0:
            try:
                item = next(items)
            except StopIteration:
                return
            yield self.check(item)
            del item
        yield from items

    def check(self, result: Any, item: Any = None) -> Any:
        """Returns the result; what it has of ``item``, from which it was made, does not count.

        Raises:
            GraphError: it lies where one before lies, which has changed.
        """
        if self.left <= 0:
            return result
        if result is None and item is not None and self.left == self.CHECKED:
            log.warning(
                "%s returned None for its first item, which goes on as None: does it end without a return? To drop "
                "items, use ops.Filter",
                self._whose,
            )
        try:
            self._compare(result, item)
        except GraphError:
            raise
        except Exception:
            self.left -= 1
        return result

    def _compare(self, result: Any, item: Any) -> None:
        leaves_here = _contained(result, self.ARRAYS) if result is not item else []
        arrays = [array for _, array in leaves_here]
        for kept, checksum in self._before if arrays else ():
            array = _array_of(kept())
            if array is None or not any(map(partial(np.may_share_memory, array), arrays)):
                continue
            if self._checksum(array) != checksum:
                raise GraphError(
                    f"{self._whose} gives the same buffer again with other values, while what it gave before may still "
                    "wait in a queue, where it is not copied: give a new array each time (buffer.copy(), "
                    "tensor.clone())"
                )
        self.left -= 1
        if not self.left:
            self._before = []
        elif arrays:
            begins, ends = _spans([array for _, array in _contained(item, None)])
            for leaf, array in leaves_here:
                if not _lies_in(array, begins, ends):
                    self._before.append((self._kept(leaf, array.nbytes), self._checksum(array)))

    def _kept(self, leaf: Any, nbytes: int) -> Callable[[], Any]:
        if nbytes > self._room:
            return weakref.ref(leaf)
        self._room -= nbytes
        return lambda: leaf

    def _checksum(self, array: Any) -> int:
        return crc32(_bytes(array)[: self.MAX_BYTES])


def _contained(data: Any, most: int | None) -> list[tuple[Any, Any]]:
    """The contiguous arrays and tensors in memory that ``data`` is, or that its containers hold, each also as an array;
    ``most`` of them."""
    found = ((leaf, _array_of(leaf)) for leaf in leaves(data))
    return list(islice((each for each in found if each[1] is not None and _is_bytes(each[1])), most))


def _spans(arrays: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Where arrays begin, in order; and the furthest end of those so far."""
    spans = sorted((array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays)
    return [begin for begin, _ in spans], list(accumulate((end for _, end in spans), max))


def _lies_in(array: Any, begins: Sequence[int], ends: Sequence[int]) -> bool:
    """Whether an array shares memory with these spans."""
    begin = array.ctypes.data
    before = bisect_left(begins, begin + array.nbytes)
    return before > 0 and ends[before - 1] > begin


def _is_bytes(array: Any) -> bool:
    return bool(
        array.size and array.flags.c_contiguous and not array.dtype.hasobject and not _is_mapped(array)
    )


def _bytes(array: Any) -> Any:
    return np.asarray(array).reshape(-1).view(np.uint8).data  # of a masked array, what it masks


def _array_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided or value.is_quantized:
            return None
        try:
            return value.detach().numpy()
        except (RuntimeError, TypeError):  # no dtype of NumPy's, no memory of its own
            return None
    return value if isinstance(value, np.ndarray) else None


def _is_mapped(array: Any) -> bool:
    """Whether an array is a file that the training loop cannot write to, or that was cut: reading it would end us."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and (not array.flags.writeable or _is_cut(array)):
            return True
        array = array.base
    return False


def _is_cut(array: Any) -> bool:
    """Whether the file of a memmap has become shorter than the map."""
    mapped = getattr(array, "_mmap", None)
    if not isinstance(mapped, mmap.mmap):  # computed from a map: of its class, in memory of its own
        return False
    try:
        begins: int = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
        return mapped.size() < begins + len(mapped)
    except (OSError, ValueError):  # it is closed
        return True
