"""Copying a whole batch to a device on a stage's own stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipegraph.device.backend import Backend, Event, Stream, late
from pipegraph.errors import DeviceError
from pipegraph.tree import map_leaves


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device, differentiably; the same where it lies there.

    Towards a device the copy is asynchronous, on the current stream. Towards the host it is waited for: who reads host
    memory waits for no stream, and would read what was there before.
    """
    return tensor.to(device, non_blocking=device.type != "cpu" and late(tensor))


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
            copy = torch.empty_like(leaf, device=backend.device, requires_grad=False)
            pairs.append((copy, leaf))
            made.extend(components(copy))
            return copy
        try:  # few devices fill a sparse tensor that is there: torch makes it there of its parts
            with backend.use(stream):
                copy = leaf.detach().to(backend.device, non_blocking=all(map(late, components(leaf))))
            made.extend(components(copy))
        except RuntimeError as error:
            what = "nested" if leaf.is_nested else leaf.layout
            raise DeviceError(
                f"torch has no {what} tensors on {backend.device}: copy its dense parts, and make it of them there"
            ) from error
        return copy

    consumer = backend.current_stream()
    with backend.use(consumer):
        copied = map_leaves(allocated, tree)
        # The new memory may be a block that earlier work of the consumer still uses.
        stream.wait_event(consumer.record_event())
    with torch.no_grad(), backend.use(stream):
        for copy, leaf in pairs:
            backend.copy(copy, leaf)
    parts = [part for part in made if part.device == backend.device]
    arrival = Arrival(stream.record_event(), backend, [], parts)
    arrival.read_on(stream)
    return copied, arrival
