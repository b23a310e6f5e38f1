"""What the user's code has handed out, and whether it was changed in place: by a stage, or by that code itself.

These are checks of values of any class: one that behaves unlike its class is not checked, and fails nothing.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, islice
from typing import Any
from zlib import crc32

import numpy as np
import torch

from pipegraph.errors import GraphError
from pipegraph.estimates import attributes_of
from pipegraph.fingerprints import DATA, OPAQUE, array_of, fingerprint, is_mapped
from pipegraph.tree import ATOMS, leaves


class AsItWas:
    """An object whose attributes a function may change, and what they were. Attributes without a value, and private
    ones beside public ones, do not count: objects fill these in when they are used.

    Attributes:
        value: the object.
    """

    LAZY = frozenset({"PIL", "pandas"})
    """Packages whose objects change when they are used."""

    __slots__ = ("_fingerprint", "_names", "value")

    def __init__(self, value: Any, names: Sequence[str]) -> None:
        self.value = value
        self._names = names
        self._fingerprint = self._now()

    @classmethod
    def of(cls, value: Any) -> list[AsItWas]:
        """For a plain object; else nothing."""
        if type(value) in DATA or isinstance(value, (torch.Tensor, np.ndarray, *OPAQUE)):
            return []
        if type(value).__module__.partition(".")[0] in cls.LAZY:
            return []
        filled = [name for name, each in attributes_of(value).items() if each is not None]
        names = [name for name in filled if name[:1] != "_"] or filled
        return [cls(value, names)] if names else []

    def _now(self) -> int:
        found = attributes_of(self.value)
        return fingerprint(*(found.get(name) for name in self._names))[0]

    def changed(self) -> bool:
        """Whether an attribute has another value."""
        return self._now() != self._fingerprint


class HandedOut:
    """Remembers where the first values that a source handed out lie, to find those that a stage has changed in place.

    Only memory and objects that the source's data holds itself count: what was made for a sample may be changed.
    """

    VALUES = 8
    MAX_BYTES = 1 << 16

    def __init__(self) -> None:
        self._notes: dict[int, tuple[int, int]] = {}  # by address: bytes, their checksum
        self._objects: list[AsItWas] = []
        self._fresh = False  # objects are made for each sample
        self._left = self.VALUES

    def __reduce__(self) -> tuple[Any, ...]:
        return HandedOut, ()

    @property
    def full(self) -> bool:
        """Whether it needs no more values."""
        return self._left <= 0

    def note(self, values: Sequence[Any]) -> None:
        """Called before a stage gets the values."""
        for value in values[: self._left]:
            self._left -= 1
            with suppress(Exception):
                for leaf in leaves(value):
                    self._note(leaf)

    def _note(self, leaf: Any) -> None:
        array = array_of(leaf)
        if array is None:
            self._objects += () if self._fresh else AsItWas.of(leaf)
        elif _is_bytes(array):
            nbytes = min(array.nbytes, self.MAX_BYTES)
            self._notes.setdefault(array.ctypes.data, (nbytes, crc32(_bytes(array)[:nbytes])))

    def forget(self) -> None:
        """A pass begins: what was changed before it is none of its stages' doing."""
        self._notes.clear()
        self._objects.clear()
        self._left = self.VALUES

    def changed(self, data: Any) -> bool:
        """Whether memory of ``data`` that was handed out holds other values now."""
        with suppress(Exception):
            return self._changed(data)
        return False

    def _changed(self, data: Any) -> bool:
        changed = {id(each.value) for each in list(self._objects) if each.changed()}
        if changed:
            if any(id(value) in changed for value in _all(data)):
                return True
            self._fresh = True
            self._objects.clear()
        if not self._notes:
            return False
        notes = dict(self._notes)
        for one in _arrays(data):
            begin = one.ctypes.data
            for address, (nbytes, checksum) in notes.items():
                if begin <= address and address + nbytes <= begin + one.nbytes:
                    first = address - begin
                    if crc32(_bytes(one)[first : first + nbytes]) != checksum:
                        return True
        return False


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
            array = array_of(kept())
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
    found = ((leaf, array_of(leaf)) for leaf in leaves(data))
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
        array.size and array.flags.c_contiguous and not array.dtype.hasobject and not is_mapped(array)
    )


def _bytes(array: Any) -> Any:
    return np.asarray(array).reshape(-1).view(np.uint8).data  # of a masked array, what it masks


def _arrays(data: Any) -> Iterator[Any]:
    """The contiguous arrays in memory that data consists of."""
    for value in _all(data):
        array = array_of(value)
        if array is not None and _is_bytes(array):
            yield array


def _all(data: Any) -> Iterator[Any]:
    """The objects that data consists of; of long lists all, for any may have been handed out."""
    seen: set[int] = set()
    left = deque([data])
    while left:
        value = left.popleft()
        if type(value) in ATOMS or isinstance(value, str | bytes) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, torch.Tensor | np.ndarray):
            continue
        if isinstance(value, list | tuple):
            if not ATOMS.issuperset(map(type, value)):
                left.extend(value)
        elif isinstance(value, dict):
            left.extend(value.values())
        elif not isinstance(value, OPAQUE):
            left.extend(attributes_of(value).values())
