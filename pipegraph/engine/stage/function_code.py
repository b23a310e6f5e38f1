"""Users' functions as text that is the same in every process: their code and the values they carry. For a Cache."""

from __future__ import annotations

import array
import contextlib
import copyreg
import dis
import functools
import hashlib
import inspect
import sys
from argparse import Namespace
from collections import deque
from collections.abc import ItemsView, Iterator, KeysView, Sequence, ValuesView
from functools import lru_cache
from itertools import chain, islice
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from pipegraph.estimates import attributes_of
from pipegraph.parameters import ENTRIES
from pipegraph.tree import ATOMS, bytes_of

PIECE_BYTES, SAMPLED_PIECES = 1 << 14, 64
"""Of arrays above a megabyte only 64 pieces of 16 KiB are hashed: the arrays may be mapped files."""

_PLAIN = str | bytes | bool | int | float | complex | None
_CONTAINERS = {list, tuple, set, frozenset, deque, dict}
_BUFFERS = {bytearray, memoryview, array.array}
_DATA = ATOMS | _CONTAINERS | _BUFFERS | {str, bytes, np.ndarray, torch.Tensor}
_PLACES_OF_DATA = (Namespace, SimpleNamespace)


def code_of(function: Any) -> str:
    """A function's instructions, and the values that it carries and reads.

    These are: its defaults, its closure, what ``functools.partial`` has bound, and the object that it is a method of;
    of the globals that it reads: data, callable objects, what its own module defines, and data of other modules. An
    object counts by the code of its class and its public attributes, and by what it is pickled as if it has none or its
    class says so itself; a network by its weights. Functions and classes of other modules are not included.
    """
    return repr(_function(function, {}))


def _function(function: Any, seen: dict[int, Any]) -> Any:
    bound: list[Any] = []
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        bound += [*function.args, *sorted(function.keywords.items())]
        function = inspect.unwrap(function.func)
    owner: Any = None
    if isinstance(function, MethodType):
        owner, function = function.__self__, function.__func__
    elif not isinstance(function, FunctionType):
        owner = function
    found: list[Any] = []
    if isinstance(function, FunctionType):
        bound += [*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                bound.append(cell.cell_contents)
        found.append(_instructions(function.__code__))
        bound += _globals_read(function)
    found += [_value(each, seen) for each in bound]
    return [*found, _value(owner, seen)]


def _value(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, _PLAIN):
        return repr(value)
    name = type(value).__qualname__
    if isinstance(value, ModuleType):
        return [name, value.__name__]
    if inspect.isbuiltin(value):  # of a module, or a method of what it belongs to
        return [value.__qualname__, _value(value.__self__, seen)]
    if id(value) in seen:
        return [getattr(value, "__qualname__", name), seen[id(value)][0]]
    seen[id(value)] = (len(seen), value)  # keeps it alive, so that no other object gets its id
    if isinstance(value, type):
        return [value.__qualname__, _methods(value), _value(_class_data(value), seen)]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        held = _hash(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        return [name, str(value.dtype), value.shape, held, _value(_beside(value), seen)]
    if isinstance(value, torch.Tensor):
        return [name, str(value.dtype), _held(value, seen), _value(_beside(value), seen)]
    if isinstance(value, list | tuple | set | frozenset | dict | KeysView | ValuesView | ItemsView):
        if isinstance(value, set | frozenset):
            return [
                name,
                len(value),
                sorted(repr(_value(each, seen)) for each in value) if len(value) <= ENTRIES else 0,
            ]
        # Evenly spaced ones of many.
        every = islice(
            value.items() if isinstance(value, dict) else value, 0, None, 1 + len(value) // ENTRIES
        )
        return [name, len(value), [_value(each, seen) for each in every]]
    if isinstance(value, FunctionType | MethodType | functools.partial):
        return _function(value, seen)
    kept = attributes_of(value)
    network = ("_parameters", "_buffers", "_modules") if isinstance(value, torch.nn.Module) else ()
    public = {key: kept[key] for key in kept if key in network or not key.startswith("_")}
    shared = _value(_class_data(type(value)), seen)
    made_of = _made_of(value) if not public or _says_what_it_is_made_of(type(value)) else None
    return [name, shared, _methods(type(value)), _value(public, seen), _value(made_of, seen)]


def _methods(kind: type) -> list[Any]:
    return [_instructions(each.__code__) for each in vars(kind).values() if isinstance(each, FunctionType)]


def _held(tensor: torch.Tensor, seen: dict[int, Any]) -> Any:
    """A tensor's values, whatever its layout."""
    if tensor.is_nested:
        return _value(list(tensor.unbind()), seen)
    if tensor.is_quantized:
        return [str(tensor.qscheme()), _value([tensor.int_repr(), tensor.dequantize()], seen)]
    if tensor.is_meta:
        return tuple(tensor.shape)
    if tensor.layout != torch.strided:
        return _value(_made_of(tensor), seen)
    return [tuple(tensor.shape), _hash(bytes_of(tensor.cpu()).numpy())]


def _beside(value: Any) -> Any:
    """What an array or tensor of another class has beside its values."""
    if isinstance(value, np.ma.MaskedArray):
        return np.ma.getmaskarray(value), value.fill_value
    return {key: each for key, each in attributes_of(value).items() if not key.startswith("_")}


def _says_what_it_is_made_of(kind: type) -> bool:
    """A random.Random, an image of PIL's: their attributes do not tell."""
    return any(
        getattr(kind, name, None) is not getattr(object, name, None)
        for name in ("__reduce__", "__reduce_ex__", "__getstate__")
    )


def _made_of(value: Any) -> Any:
    """What an object is pickled as: a path, a date, a type of NumPy's or torch's."""
    with contextlib.suppress(Exception):
        reduce = copyreg.dispatch_table.get(type(value))
        reduced = value.__reduce_ex__(2) if reduce is None else reduce(value)
        return reduced if isinstance(reduced, str) else reduced[1:3]
    return None


def _hash(flat: np.ndarray) -> str:
    """Hash of bytes (n,): all of them, or evenly spaced pieces."""
    found = hashlib.blake2b(digest_size=8)
    step = max(PIECE_BYTES, len(flat) // SAMPLED_PIECES)
    for start in range(0, len(flat), step):
        found.update(flat[start : start + PIECE_BYTES].tobytes())
    return found.hexdigest()


def _instructions(code: CodeType) -> list[Any]:
    return [code.co_code.hex(), code.co_names, [_constant(each) for each in code.co_consts]]


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _instructions(value)
    # The order of a set's elements differs from process to process.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _class_data(kind: type) -> dict[str, Any]:
    """The public attributes of a class that are data."""
    found = ((name, each) for base in kind.__mro__ for name, each in vars(base).items())
    return {name: each for name, each in found if type(each) in _DATA and not name.startswith("_")}


def _globals_read(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reads of its module: data, callable objects, and what the module itself defines; of other
    modules, data and objects of the module's own classes: settings.

    Others, such as a logger, change by themselves, and do not change what the function returns.
    """
    for name in _global_names(function.__code__):
        value = function.__globals__.get(name, sys.modules.get(name))
        if isinstance(value, ModuleType):
            yield from _data_of(value, _all_names(function.__code__))
            continue
        if isinstance(value, FunctionType | type):
            counts = value.__module__ == function.__module__
        else:
            own = type(value).__module__ == function.__module__ or isinstance(value, _PLACES_OF_DATA)
            counts = own or type(value) in _DATA or callable(value) or not attributes_of(value)
        if counts:
            yield name, value


@lru_cache(1024)
def _global_names(code: CodeType) -> tuple[str, ...]:
    """The global names that a function reads, and the functions inside it; ``co_names`` has those of attributes too.
    The modules that it imports are among them.
    """
    read = ("LOAD_GLOBAL", "IMPORT_NAME")
    found = {str(each.argval) for each in dis.get_instructions(code) if each.opname in read}
    found.update(*(_global_names(each) for each in code.co_consts if isinstance(each, CodeType)))
    return tuple(sorted(found))


@lru_cache(1024)
def _all_names(code: CodeType) -> tuple[str, ...]:
    """The names of globals and attributes that a function reads, and the functions inside it."""
    inner = (_all_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return tuple(sorted({*code.co_names, *chain.from_iterable(inner)}))


def _data_of(module: ModuleType, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
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
            if isinstance(value, ModuleType):
                if value.__name__ not in seen:
                    seen.add(value.__name__)
                    left.append(value)
            elif type(value) in _DATA or isinstance(value, _PLACES_OF_DATA) or _is_of(value, module):
                yield f"{module.__name__}.{name}", value


def _is_of(value: Any, module: ModuleType) -> bool:
    return type(value).__module__ == module.__name__
