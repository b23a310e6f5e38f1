"""Copies attributes set on the first replica to the others.

A dropout's ``p``, a temperature, hooks, an adapter that is switched off: what you set on ``executor.module`` holds for
all replicas from the next call on. What a forward sets on ``self`` stays on its replica.
"""

from __future__ import annotations

import copy
import functools
import types
import zlib
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from pipegraph.device.backend import Slot
from pipegraph.errors import ReplicaError
from pipegraph.tree import bytes_of

# Each has a check of its own: parameters and modules may not change, buffers are copied.
APART = frozenset({"_parameters", "_buffers", "_modules"})
# Objects that an attribute may reach and that are looked through; what is larger counts by identity.
MAX_CONTAINER_ITEMS = 1000
# Arrays and CPU tensors have their bytes compared, about 1 ms per MiB; of larger ones every n-th byte.
CHECKED_BYTES = 1 << 20
_ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)


class Attributes:
    """Attributes of the replicas' modules (by replica, in the same order), as they were after the last call."""

    def __init__(self, submodules: Sequence[Sequence[Module]], slots: Sequence[Slot]) -> None:
        self._first = list(submodules[0])
        self._others = [list(given) for given in submodules[1:]]
        self._devices = [slot.device for slot in slots]
        self._seen: list[_Seen] = [_Seen(module) for module in self._first] if self._others else []

    def note(self) -> None:
        """After a call: what forwards have set stays where it is."""
        for number, seen in enumerate(self._seen):
            if seen.changed():
                self._seen[number] = _Seen(self._first[number])

    def follow(self, everything: bool = False) -> bool:
        """Before a call: give the others what has changed since the last one, or everything; whether anything has.

        Raises:
            ReplicaError: an attribute cannot be copied; names it.
        """
        changed = [
            (number, names)
            for number, seen in enumerate(self._seen)
            if (names := set(vars(self._first[number])) - APART if everything else seen.changed())
        ]
        if not changed:
            return False
        for others, device in zip(self._others, self._devices[1:], strict=True):
            memo: dict[int, Any] = {}
            for mine, its in zip(self._first, others, strict=True):
                memo[id(mine)] = its
                for held, own in ((mine._parameters, its._parameters), (mine._buffers, its._buffers)):
                    memo |= {
                        id(value): own[name]
                        for name, value in held.items()
                        if value is not None and name in own
                    }
            for number, names in changed:
                self._give(number, names, others[number], device, memo)
        for number, _ in changed:
            self._seen[number] = _Seen(self._first[number])
        return True

    def _give(
        self, number: int, names: set[str], module: Module, device: torch.device, memo: dict[int, Any]
    ) -> None:
        mine, its = vars(self._first[number]), vars(module)
        for name in names:
            if name not in mine:
                its.pop(name, None)
                continue
            try:
                if name.endswith("_hooks") and isinstance(mine[name], Mapping):
                    its[name] = _hooks(mine[name], memo)
                else:
                    its[name] = copied(mine[name], self._devices[0], device, memo)
            except Exception as error:
                raise ReplicaError(
                    f"{type(module).__name__}.{name} was set after the executor was built, and the replicas' copies "
                    f"cannot be made ({error}): set it before, or hold it outside the module"
                ) from error


class _Seen:
    """A module's attributes at one moment."""

    __slots__ = ("_empty", "_inside", "_module", "_names", "_values")

    def __init__(self, module: Module) -> None:
        self._module = module
        self._names = list(vars(module))
        self._values = list(vars(module).values())
        # Most attributes are atoms, or the empty dicts of hooks that nobody has registered.
        self._empty = []
        self._inside = []
        for name, value in zip(self._names, self._values, strict=True):
            if name in APART or isinstance(value, _ATOMS):
                continue
            if isinstance(value, (dict, list, set)) and not value:
                self._empty.append(value)
            else:
                self._inside.append((name, value, _inside(value)))

    def changed(self) -> set[str]:
        """Names of attributes that are new, gone, exchanged, or changed inside."""
        held = vars(self._module)
        names = {name for name, value, inside in self._inside if not _same(inside, _inside(value))}
        if (
            len(held) == len(self._values)
            and all(map(is_, self._values, held.values()))
            and not any(self._empty)
            and list(held) == self._names
        ):
            return names
        before = dict(zip(self._names, self._values, strict=True))
        names |= {name for name in before.keys() | held.keys() if before.get(name) is not held.get(name)}
        names |= before.keys() ^ held.keys()
        names |= {name for name, value in before.items() if any(value is one and one for one in self._empty)}
        return names - APART


def _inside(value: Any) -> list[Any]:
    """What an attribute reaches: objects to compare by identity, and numbers: versions and checksums of tensors."""
    found: list[Any] = []
    todo = [value]
    passed = {id(value)}
    while todo and len(found) < MAX_CONTAINER_ITEMS:
        one = todo.pop()
        entries: Any
        if isinstance(one, torch.Tensor):
            if not one.is_inference():
                found.append(one._version)
            if type(one) is torch.Tensor and one.device.type == "cpu" and one.layout == torch.strided:
                # Writes through `.data` or NumPy leave the version as it is.
                found.append(_checksum(bytes_of(one).numpy()))
            continue
        if isinstance(one, (np.ndarray, bytearray, array)):
            flat = np.ascontiguousarray(one).reshape(-1)
            if not flat.dtype.hasobject:
                found.append(_checksum(flat.view(np.uint8)))
                continue
            one = flat.tolist()
        if isinstance(one, Mapping):
            entries = chain(one.keys(), one.values())
        elif isinstance(one, (list, tuple, set, frozenset, deque)):
            entries = one
        elif isinstance(one, (Module, *_ATOMS)):
            continue
        else:
            slots = [getattr(one, name) for name in _members(type(one)) if hasattr(one, name)]  # type: ignore[arg-type]
            held = getattr(one, "__dict__", {})
            entries = chain(slots, held.keys(), held.values())
        for entry in entries:
            found.append(entry)
            if not isinstance(entry, _ATOMS) and id(entry) not in passed:
                passed.add(id(entry))
                todo.append(entry)
            if len(found) >= MAX_CONTAINER_ITEMS:
                break
    return found


def _checksum(flat: np.ndarray[Any, Any]) -> int:
    """Of all bytes, or of some that are spread evenly where there are many."""
    return zlib.crc32(flat[:: 1 + flat.size // CHECKED_BYTES].tobytes())


@functools.cache
def _members(kind: type) -> tuple[str, ...]:
    """The attributes that objects of a class have outside their ``__dict__``."""
    slots = chain.from_iterable(vars(each).items() for each in kind.__mro__)
    return tuple(name for name, slot in slots if isinstance(slot, types.MemberDescriptorType))


def _same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(
        a is b or (type(a) is type(b) is int and a == b) for a, b in zip(before, now, strict=True)
    )


def _hooks(hooks: Mapping[Any, Any], memo: dict[int, Any]) -> Any:
    """The same hooks, as DataParallel shares them; a method of a module becomes that of the replica's own."""
    own = copy.copy(hooks)
    for key, hook in hooks.items():
        bound = memo.get(id(getattr(hook, "__self__", None)))
        if isinstance(bound, Module) and isinstance(hook, types.MethodType):
            own[key] = types.MethodType(hook.__func__, bound)  # type: ignore[index]
    return own


def copied(value: Any, source: torch.device, target: torch.device, memo: dict[int, Any]) -> Any:
    """A deep copy whose tensors on `source` lie on `target`: those with a history come detached."""
    with _Moving(source, target):
        return copy.deepcopy(value, memo)


class _Moving(TorchFunctionMode):
    """Takes over how tensors are deep-copied: torch refuses those that are no leaves, and moves none."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._source = source
        self._target = target

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.Tensor.__deepcopy__:
            return function(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            place = self._target if tensor.device == self._source else tensor.device
            moved = tensor.detach().to(place, copy=True)
            memo[id(tensor)] = moved.requires_grad_(tensor.requires_grad and tensor.is_leaf)
        return memo[id(tensor)]
