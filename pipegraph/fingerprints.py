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
from pipegraph.tree import ATOMS

PLACES = 64
"""Entries of a large container or array that are looked at, spread evenly."""

WHOLE_BYTES = 1 << 24
"""Bytes of arrays and of lists of plain values that are looked at as a whole: the first ones found."""

TEXT = 4_096
"""Characters, or bytes, at either end of a long text that are looked at."""

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
DATA = _PLAIN | {*_CONTAINERS, *_BUFFERS, np.ndarray, torch.Tensor}
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "pipegraph"}
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
            found[of].append((len(value), hash(value[:TEXT]), hash(value[-TEXT:])))
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
    if isinstance(value, types.FunctionType):  # whose code notebooks exchange when a module is reloaded
        return value.__qualname__, id(value), id(value.__code__)
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
    array = array_of(value)
    if array is None or not array.size or array.dtype.hasobject or is_mapped(array):
        return None
    if whole:
        return crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    places = np.linspace(0, array.size - 1, min(array.size, PLACES)).astype(np.int64)
    return crc32(array.flat[places].tobytes())


def array_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided or value.is_quantized:
            return None
        try:
            return value.detach().numpy()
        except (RuntimeError, TypeError):  # no dtype of NumPy's, no memory of its own
            return None
    return value if isinstance(value, np.ndarray) else None


def is_mapped(array: Any) -> bool:
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
        yield from _methods(type(value))


def _methods(kind: type) -> Iterator[types.FunctionType]:
    """The functions of a class, and those that it has of classes of its own package or of the script."""
    own = {"__main__", kind.__module__.partition(".")[0]} - _LIBRARIES
    for base in kind.__mro__:
        if base is not kind and base.__module__.partition(".")[0] not in own:
            continue
        for each in list(vars(base).values()):
            if isinstance(each, property):
                each = each.fget
            elif isinstance(each, staticmethod | classmethod):
                each = each.__func__
            if isinstance(each, types.FunctionType):
                yield each


def class_data(kind: type) -> dict[str, Any]:
    """The public attributes of a class that are data."""
    found = ((name, each) for base in kind.__mro__ for name, each in vars(base).items())
    return {name: each for name, each in found if type(each) in DATA and not name.startswith("_")}


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
            counts = own or type(value) in DATA or callable(value) or not attributes_of(value)
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
        held = vars(module)
        for name in filter(
            held.__contains__, names
        ):  # what it lacks counts for nothing: libraries import modules later
            value = held[name]
            if isinstance(value, types.ModuleType):
                if value.__name__ not in seen:
                    seen.add(value.__name__)
                    left.append(value)
            elif type(value) in DATA or isinstance(value, _PLACES_OF_DATA) or _is_of(value, module):
                yield f"{module.__name__}.{name}", value


def _is_of(value: Any, module: types.ModuleType) -> bool:
    return type(value).__module__ == module.__name__


def length_of(items: Any) -> int | None:
    """How many there are; None where that is not known, which ``len`` may say only when it is asked.

    Each library by an error of its own: torch's DataLoader over an IterableDataset raises TypeError, others
    NotImplementedError, RuntimeError or an AttributeError of what they wrap.
    """
    try:
        return len(items)
    except Exception:
        return None
