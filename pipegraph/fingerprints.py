"""Fingerprints of data in memory: whether somebody has changed it, found in a few milliseconds."""

from __future__ import annotations

import array
import ctypes
import dis
import io
import mmap
import pickle
import sys
import types
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, islice
from pathlib import PurePath
from typing import Any
from zlib import crc32

import numpy as np
import torch

from pipegraph.estimates import attributes_of
from pipegraph.tree import ATOMS, leaves

PLACES = 64
"""Entries of a large container or array that are looked at, spread evenly."""

WHOLE_BYTES = 1 << 24
"""Bytes of arrays and of lists of plain values that are looked at as a whole: the first ones found."""

OBJECTS = 2_000
"""Objects that are looked at."""

OPAQUE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    torch.Generator,
)


_PLAIN = ATOMS | {str, bytes}
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_BUFFERS = (bytearray, memoryview, array.array, ctypes.Array, ctypes._SimpleCData)
_DATA = _PLAIN | {*_CONTAINERS, *_BUFFERS, np.ndarray, torch.Tensor}
_PLACES_OF_DATA = (Namespace, types.SimpleNamespace)


def fingerprint(*values: Any) -> tuple[int, int]:
    """Two numbers that differ, most likely, once a training loop has changed ``values``: sizes, labels, weights.

    Looks into containers, objects and what functions read, not into files. Equal numbers do not prove that nothing has
    changed.

    Returns:
        For what the values hold, and for what they read of their classes and modules.
    """
    found: tuple[list[Any], list[Any]] = [], []
    seen: set[int] = set()
    left = deque((value, 0) for value in values)
    unread = WHOLE_BYTES
    while left and len(seen) < OBJECTS:
        value, of = left.popleft()
        if type(value) in ATOMS:
            found[of].append(value)
        elif isinstance(value, str | bytes):
            found[of].append((len(value), value[:PLACES]))
        elif isinstance(value, PurePath):  # its slots also hold what it has computed so far
            found[of].append(str(value))
        elif id(value) not in seen:
            seen.add(id(value))
            try:
                nbytes = _nbytes(value)
                whole = nbytes <= unread
                unread -= nbytes if whole else 0
                plain = whole and _is_plain(value)
                found[of].append(crc32(pickle.dumps(value)) if plain else _own(value, whole))
                if not plain:
                    left.extend((inner, of) for inner in _held(value))
                    left.extend((inner, 1) for inner in _read(value))
            except Exception:  # a class of the user's that behaves unlike its base
                found[of].append(type(value).__qualname__)
    return hash(repr(found[0])), hash(repr(found[1]))


def _is_plain(value: Any) -> bool:
    """Whether a list or mapping holds nothing but numbers and texts."""
    if isinstance(value, dict):
        return _PLAIN.issuperset(map(type, value)) and _PLAIN.issuperset(map(type, value.values()))
    return isinstance(value, list | tuple | deque) and _PLAIN.issuperset(map(type, value))


def _own(value: Any, whole: bool) -> Any:
    """What tells a changed value by itself."""
    if isinstance(value, torch.Tensor):
        version = None if value.is_inference() else value._version
        return id(value), tuple(value.shape), version, _sampled(value, whole)
    if isinstance(value, np.ndarray):
        return tuple(value.shape), value.dtype.str, _sampled(value, whole)
    if isinstance(value, _CONTAINERS):
        return type(value).__name__, len(value)
    if isinstance(value, _BUFFERS):
        return type(value).__name__, _nbytes(value), _of_buffer(value, whole)
    if isinstance(value, types.MethodType):
        return id(value.__func__)
    if isinstance(value, io.BytesIO):
        return crc32(value.getbuffer()[: len(value.getbuffer()) if whole else PLACES])
    return type(value).__qualname__, id(value) if isinstance(value, OPAQUE) else None


def _of_buffer(value: Any, whole: bool) -> Any:
    """All bytes or some elements, copied: a view of a bytearray would keep others from resizing it."""
    if whole or _nbytes(value) <= PLACES:
        return crc32(bytes(value))
    return [value[place] for place in range(0, len(value), 1 + len(value) // PLACES)]


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.nbytes if getattr(value, "layout", torch.strided) == torch.strided else 0
    if isinstance(value, _BUFFERS):
        return memoryview(value).nbytes
    return 8 * len(value) if isinstance(value, list | tuple | deque) else 0


def _sampled(value: Any, whole: bool) -> int | None:
    """A checksum of all or some elements, without reading files or devices."""
    array = _array_of(value)
    if array is None or not array.size or array.dtype.hasobject or _is_mapped(array):
        return None
    if whole:
        return crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    places = np.linspace(0, array.size - 1, min(array.size, PLACES)).astype(np.int64)
    return crc32(array.flat[places].tobytes())


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
    try:
        begins = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
        return mapped is not None and mapped.size() < begins + len(mapped)
    except (OSError, ValueError):  # it is closed
        return True


def _held(value: Any) -> Iterator[Any]:
    """What a value holds itself."""
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty one
                yield cell.cell_contents
        yield from value.__defaults__ or ()
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, _CONTAINERS):
        step = max(1, len(value) // PLACES)
        yield from islice(value, 0, None, step)
        if isinstance(value, dict):
            yield from islice(value.values(), 0, None, step)
        elif value and isinstance(value, list | tuple | deque):
            yield value[-1]
    elif isinstance(value, np.ndarray):
        if hasattr(value, "mask"):
            yield value.mask
        elif value.dtype == object:
            yield from value.flat[:: max(1, value.size // PLACES)]
    elif not isinstance(value, (torch.Tensor, *_BUFFERS, *OPAQUE)):
        yield from attributes_of(value).values()


def _read(value: Any) -> Iterator[Any]:
    """What a value's functions read of its class and their modules."""
    if isinstance(value, types.FunctionType):
        yield from [each for _, each in globals_read(value)]
    elif isinstance(value, type):
        yield from class_data(value).values()
    elif not isinstance(value, (torch.Tensor, np.ndarray, *_CONTAINERS, *_BUFFERS, *OPAQUE)):
        yield from class_data(type(value)).values()
        yield from [each for each in vars(type(value)).values() if isinstance(each, types.FunctionType)]


def class_data(kind: type) -> dict[str, Any]:
    """The public attributes of a class that are data."""
    found = ((name, each) for base in kind.__mro__ for name, each in vars(base).items())
    return {name: each for name, each in found if type(each) in _DATA and not name.startswith("_")}


def globals_read(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reads of its module: data, callable objects, and what the module itself defines; of other
    modules, data and objects of the module's own classes: settings.

    Others, such as a logger, change by themselves, and do not change what the function returns.
    """
    for name in _global_names(function.__code__):
        value = function.__globals__.get(name, sys.modules.get(name))
        if isinstance(value, types.ModuleType):
            yield from _data_of(value, _all_names(function.__code__))
            continue
        if isinstance(value, types.FunctionType | type):
            counts = value.__module__ == function.__module__
        else:
            own = type(value).__module__ == function.__module__ or isinstance(value, _PLACES_OF_DATA)
            counts = own or type(value) in _DATA or callable(value) or not attributes_of(value)
        if counts:
            yield name, value


@lru_cache(1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The global names that a function reads, and the functions inside it; ``co_names`` has those of attributes too.
    The modules that it imports are among them.
    """
    read = ("LOAD_GLOBAL", "IMPORT_NAME")
    found = {str(each.argval) for each in dis.get_instructions(code) if each.opname in read}
    found.update(*(_global_names(each) for each in code.co_consts if isinstance(each, types.CodeType)))
    return tuple(sorted(found))


@lru_cache(1024)
def _all_names(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes that a function reads, and the functions inside it."""
    inner = (_all_names(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return tuple(sorted({*code.co_names, *chain.from_iterable(inner)}))


def _data_of(module: types.ModuleType, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """What has one of these names in a module, or in the modules that have one in it. Those of Python itself hold
    no settings of the user's.
    """
    left, seen = deque([module]), {module.__name__}
    while left:
        module = left.popleft()
        if module.__name__.partition(".")[0] in sys.stdlib_module_names:
            continue
        for name in names:
            value = vars(module).get(name)
            if isinstance(value, types.ModuleType):
                if value.__name__ not in seen:
                    seen.add(value.__name__)
                    left.append(value)
            elif type(value) in _DATA or isinstance(value, _PLACES_OF_DATA) or _is_of(value, module):
                yield f"{module.__name__}.{name}", value


def _is_of(value: Any, module: types.ModuleType) -> bool:
    return type(value).__module__ == module.__name__


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
        if type(value) in _DATA or isinstance(value, (torch.Tensor, np.ndarray, *OPAQUE)):
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
            for leaf in leaves(value):
                array = _array_of(leaf)
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


def _is_bytes(array: Any) -> bool:
    return bool(
        array.size and array.flags.c_contiguous and not array.dtype.hasobject and not _is_mapped(array)
    )


def _bytes(array: Any) -> Any:
    return np.asarray(array).reshape(-1).view(np.uint8).data  # of a masked array, what it masks


def _arrays(data: Any) -> Iterator[Any]:
    """The contiguous arrays in memory that data consists of."""
    for value in _all(data):
        array = _array_of(value)
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


def length_of(items: Any) -> int | None:
    """How many there are; None where that is not known, which ``len`` may say only when it is asked.

    Each library by an error of its own: torch's DataLoader over an IterableDataset raises TypeError, others
    NotImplementedError, RuntimeError or an AttributeError of what they wrap.
    """
    try:
        return len(items)
    except Exception:
        return None
