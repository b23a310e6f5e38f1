"""Objects that move their tensors themselves: by ``to(device)`` and ``pin_memory()``, as torch has it."""

from __future__ import annotations

import copy
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from pipegraph.device.copy import components
from pipegraph.device.split import rule_for
from pipegraph.tree import ATOMS, attributes_of, entries, leaves, map_leaves, rebuilt

_PLAIN = ATOMS | {str, bytes}
_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, np.ndarray)
_LOOKED_AT = 1000
"""Values of an object that are searched for tensors."""


class _Aside:
    """In the place of a moved object while the tensors beside it are moved: no other step finds its tensors."""

    def __init__(self, value: Any) -> None:
        self.value = value


def held_apart(data: Any, move: Callable[[Any], Any]) -> Any:
    """The tree with what ``move`` makes of each object held apart; the tree itself if ``move`` gives None for all.

    Dicts, lists and tuples are no objects.
    """
    kind = type(data)
    if kind in _PLAIN or isinstance(data, torch.Tensor | np.ndarray):
        return data
    if kind not in (dict, list, tuple) and (moved := move(data)) is not None:
        return _Aside(moved)
    below = [entry for _, entry in entries(data) or ()]
    made = [held_apart(entry, move) for entry in below]
    if all(map(lambda new, old: new is old, made, below)):
        return data
    return rebuilt(data, made)


def put_back(data: Any) -> Any:
    """The inverse of :func:`held_apart`, with the moved objects."""
    return map_leaves(lambda leaf: leaf.value if type(leaf) is _Aside else leaf, data)


def moved_by_itself(thing: Any, device: torch.device) -> Any:
    """A copy of an object on a device, by its type's ``register_scatter`` or its own ``to``; None if it has neither."""
    rule = rule_for(thing)
    if rule is not None:
        return rule.move(thing, device)
    if callable(getattr(thing, "to", None)) and not isinstance(thing, type):
        move = copy.copy(thing).to  # some move themselves, and others may hold this one
        return move(device, non_blocking=True) if _takes_non_blocking(move) else move(device)
    return None


def pinned_by_itself(thing: Any) -> Any:
    """A copy of an object in pinned memory, by its own ``pin_memory``; None if it has none."""
    if callable(getattr(thing, "pin_memory", None)) and not isinstance(thing, type):
        return copy.copy(thing).pin_memory()
    return None


def tensors_within(thing: Any, device: torch.device) -> list[torch.Tensor]:
    """The tensors on a device in a tree, and in the objects in it."""
    return [part for tensor in _tensors(thing) for part in components(tensor) if part.device == device]


def _takes_non_blocking(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # of native code
        return False
    return "non_blocking" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _tensors(thing: Any) -> Iterator[torch.Tensor]:
    left, seen = [thing], set[int]()
    while left and len(seen) < _LOOKED_AT:
        for leaf in islice(leaves(left.pop()), _LOOKED_AT):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif type(leaf) not in _PLAIN and not isinstance(leaf, _SHARED) and id(leaf) not in seen:
                seen.add(id(leaf))
                left += attributes_of(leaf).values()
                left += leaf if isinstance(leaf, set | frozenset | deque) else ()
