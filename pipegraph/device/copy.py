"""Copying a whole batch to a device on a stage's own stream; and objects that move their tensors themselves, by
``to(device)`` and ``pin_memory()``, as torch has it."""

from __future__ import annotations

import copy
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from pipegraph.device.backend import Backend, Event, Stream, late
from pipegraph.device.split import rule_for
from pipegraph.errors import DeviceError
from pipegraph.tree import ATOMS, attributes_of, leaves, map_leaves, named, rebuilt


class Arrival(Event):
    """The event of a copy. A stream that waits for it is a reader of what has arrived, and noted as one.

    Args:
        readers: streams noted so far; shared with a lease.
        buffers: the memory that has arrived: every reader is reported to its allocator.
    """

    def __init__(
        self, copied: Event, backend: Backend, readers: list[Stream], buffers: Sequence[torch.Tensor]
    ) -> None:
        self._copied = copied
        self._backend = backend
        self._readers = readers
        self._buffers = list(buffers)

    def joined(self, earlier: Arrival | None) -> Arrival:
        """The arrival of both, where the earlier one is of the same stream."""
        if earlier is not None:
            self._buffers += earlier._buffers
        return self

    def wait(self, stream: Stream | None = None) -> None:
        reader = self._backend.current_stream() if stream is None else stream
        self._copied.wait(reader)
        self.read_on(reader)

    def read_on(self, stream: Stream) -> None:
        """Note that ``stream`` reads what has arrived."""
        if stream not in self._readers:
            self._readers.append(stream)
        for buffer in self._buffers:
            self._backend.read_on(buffer, stream)

    def query(self) -> bool:
        return self._copied.query()

    def synchronize(self) -> None:
        self._copied.synchronize()


def components(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a tensor of any layout or subclass consists of."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in components(getattr(tensor, name))]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [*tensor.unbind()[:1]] if tensor.is_nested else [tensor]  # its rows share one memory


def copy_tree(tree: Any, backend: Backend, stream: Stream) -> tuple[Any, Arrival]:
    """Copy the tensors of `tree` to the backend's device on `stream`. Returns at once.

    The copies' memory comes from the pool of the calling thread's current stream. It may be freed while the copy, or
    a stream that has waited for the arrival, still uses it.

    Args:
        tree: any nest of dicts, lists, tuples, named tuples, dataclasses; leaves that are
            no tensors are passed on as they are. Strides of dense tensors are kept.
        backend: of the target device.
        stream: of that backend, the stage's own.

    Returns:
        The same nest with the copies, and the event after which they may be
        read: ``event.wait()`` makes the calling thread's current stream wait for it, and the
        host only where the host is that stream. The bytes of `tree` must stay as they are until
        the event is reached; then they may be overwritten.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    made: list[torch.Tensor] = []

    def allocated(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        plain = leaf.layout is torch.jagged or (leaf.layout is torch.strided and not leaf.is_nested)
        if plain or backend.device.type == "cpu":
            there = torch.empty_like(leaf, device=backend.device, requires_grad=False)
            pairs.append((there, leaf))
            made.extend(components(there))
            return there
        try:  # few devices fill a sparse tensor that is there: torch makes it there of its parts
            with backend.use(stream):
                there = leaf.detach().to(backend.device, non_blocking=all(map(late, components(leaf))))
            made.extend(components(there))
        except RuntimeError as error:
            what = "nested" if leaf.is_nested else leaf.layout
            raise DeviceError(
                f"torch has no {what} tensors on {backend.device}: copy its dense parts, and make it of them there"
            ) from error
        return there

    consumer = backend.current_stream()
    with backend.use(consumer):
        copied = map_leaves(allocated, tree)
        # The new memory may be a block that earlier work of the consumer still uses.
        stream.wait_event(consumer.record_event())
    with torch.no_grad(), backend.use(stream):
        for there, leaf in pairs:
            backend.copy(there, leaf)
    parts = [part for part in made if part.device == backend.device]
    arrival = Arrival(stream.record_event(), backend, [], parts)
    arrival.read_on(stream)
    return copied, arrival


# -- objects that move themselves ------------------------------------------------------------------

_PLAIN = ATOMS | {str, bytes}
_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, np.ndarray)
_LOOKED_AT = 1000
"""Values of an object that are searched for tensors."""


class _Aside:
    """In the place of a moved object while the tensors beside it are moved: no other step finds its tensors."""

    def __init__(self, value: Any) -> None:
        self.value = value


def held_apart(data: Any, device: torch.device | None) -> Any:
    """The tree with each object that moves itself held apart, moved to a device, or to pinned memory for None; the tree
    itself if there is none. Dicts, lists and tuples are no objects.
    """
    kind = type(data)
    if kind in _PLAIN or isinstance(data, torch.Tensor | np.ndarray):
        return data
    if kind not in (dict, list, tuple) and (moved := _moved_by_itself(data, device)) is not None:
        return _Aside(moved)
    below = list((named(data) or {}).values())
    made = [held_apart(entry, device) for entry in below]
    if all(map(lambda new, old: new is old, made, below)):
        return data
    return rebuilt(data, made)


def put_back(data: Any) -> Any:
    """The inverse of :func:`held_apart`, with the moved objects."""
    return map_leaves(lambda leaf: leaf.value if type(leaf) is _Aside else leaf, data)


def _moved_by_itself(thing: Any, device: torch.device | None) -> Any:
    """A copy of an object there, by its type's ``register_scatter``, or its own method; None if it has neither."""
    if device is not None and (rule := rule_for(thing)) is not None:
        return rule.move(thing, device)
    method = "pin_memory" if device is None else "to"
    if not callable(getattr(thing, method, None)) or isinstance(thing, type):
        return None
    move = getattr(copy.copy(thing), method)  # some move themselves, and others may hold this one
    if device is None:
        return move()
    return move(device, non_blocking=True) if _takes_non_blocking(move) else move(device)


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
