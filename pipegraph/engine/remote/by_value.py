"""Classes of ``__main__``, of notebooks and of functions: sent to other processes by value, and back by their number.

cloudpickle alone would send them by value both ways. Each object that comes back would then set the attributes of its
class to what they were when the other process got it, and a class with slots could not be read, for the other process
has it without.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import cloudpickle
import numpy as np

from pipegraph.forks import in_child

_ARRAYS = frozenset({np.ndarray, np.memmap})

_SENT: dict[str, type] = {}
"""By number, what this process, and not its parent, has sent by value: kept, since objects of it may come back."""

in_child(_SENT.clear)

_GIVEN: WeakKeyDictionary[type, str] = WeakKeyDictionary()
"""The numbers of classes that this process was sent by value."""


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, but for these classes.

    Args:
        file: what it writes to.
        back: whether the reader is the process that this one has its classes from.
    """

    def __init__(self, file: object, back: bool, **options: object) -> None:
        super().__init__(file, protocol=5, **options)
        self._back = back

    def reducer_override(self, value: Any) -> Any:
        if self._back and isinstance(value, type) and (number := _GIVEN.get(value)) is not None:
            return _sent, (number,)
        kind = type(value)
        if kind is io.TextIOWrapper and value not in (sys.stdout, sys.stderr):
            # cloudpickle would send its text, in which places count characters: seek() would read wrong lines.
            raise TypeError(f"cannot pickle an open file, {value!r}")
        # NumPy's pickles keep another byte order only for arrays of its own class, without gaps.
        if (
            kind in _ARRAYS
            and not value.dtype.isnative
            and (kind is np.memmap or not value.flags.c_contiguous)
        ):
            return _viewed, (np.array(value, order="C", subok=False), kind)
        reduced = super().reducer_override(value)
        if not isinstance(value, type) or reduced is NotImplemented or len(reduced) < 6:
            return reduced  # it is no class, or one that the reader imports
        make, arguments, *rest = reduced
        slots = vars(value).get("__slots__")
        # Those of a tuple are empty, and NamedTuple writes them itself.
        if (
            not issubclass(value, tuple)
            and isinstance(slots, str | list | tuple | dict)
            and isinstance(arguments[3], dict)
        ):
            arguments[3]["__slots__"] = slots
        _SENT[arguments[-2]] = value
        return _made, (make, arguments), *rest


def _viewed(array: np.ndarray, kind: type) -> np.ndarray:
    return array.view(kind)


def _made(make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    """The class without its attributes, which follow."""
    made = make(*arguments)
    if arguments[-2] not in _SENT:
        _GIVEN[made] = arguments[-2]
    return made


def _sent(number: str) -> type:
    mine = _SENT.get(number)
    # What was written for the other process is read here, as an exception may be.
    return next(given for given, its in list(_GIVEN.items()) if its == number) if mine is None else mine


def dumps_back(value: object) -> bytes:
    """A pickle for the process that this one has its classes from."""
    file = io.BytesIO()
    ByValuePickler(file, True).dump(value)
    return file.getvalue()
