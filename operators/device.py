"""To the device: ``Pin``, ``CopyToDevice``, ``Scatter``.

Copies run on a stream of the stage's own. What leaves carries an event (``chunk.ready``) that the loader makes
its consumer's current stream wait for: the host never waits. Where an ordinary stage reads the copy, it is
waited for before the chunk leaves, because that stage knows of no streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, final

import torch

from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator
from pipegraph.device import (
    Backend,
    Event,
    Scattered,
    Slot,
    Stream,
    backend_for,
    copy_tree,
    normalised,
    slots_on,
)
from pipegraph.errors import GraphError
from pipegraph.replicas.parts import Whole, chunk_sizes_for, cut, map_tree, rows_of
from pipegraph.tree import map_leaves

COPIES_IN_FLIGHT = 3
"""Copies whose sources are kept while the device may still read them; one more waits for the oldest."""


def _device(device: torch.device | str | int, what: str) -> torch.device:
    try:
        return normalised(device)
    except RuntimeError as error:
        raise GraphError(f"{what}: {device!r} names no device; use 'cpu', 'cuda' or 'cuda:1'") from error


def _cuda_here() -> bool:
    from pipegraph.device.cuda import is_available

    return is_available()


@final
class Pin(Operator):
    """Tensors into pinned host memory, from which the device copies without the host's help.

    What is pinned already is left as it is. Without a CUDA device there is nothing to pin for, and the plan leaves
    this stage out.
    """

    default_name = "pin"

    def bypass(self) -> str | None:
        return None if _cuda_here() else "no CUDA device here, so nothing is pinned"

    def process(self, chunk: Chunk) -> Chunk:
        chunk.keys = chunk.keys
        chunk.data = map_leaves(_pinned, chunk.data)
        return chunk


def _pinned(leaf: Any) -> Any:
    return leaf.pin_memory() if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" else leaf


class _Copies:
    """The streams of one worker, and what its unfinished copies still read. One thread uses it."""

    def __init__(self, devices: Sequence[Slot], stage: str) -> None:
        self._backends: dict[torch.device, Backend] = {}
        self.streams: list[tuple[Backend, Stream]] = []
        for slot in devices:
            backend = self._backends.get(slot.device)
            if backend is None:
                backend = self._backends[slot.device] = backend_for(slot.device)
            self.streams.append((backend, backend.stream(slot, f"{stage}-{slot}")))
        self._reading: deque[tuple[list[Event], Any]] = deque()

    def hold(self, events: list[Event], source: Any) -> None:
        """Keep ``source`` until ``events`` are reached: reused earlier, the copy would read the next batch."""
        self._reading.append((events, source))
        while self._reading and all(event.query() for event in self._reading[0][0]):
            self._reading.popleft()
        while len(self._reading) > COPIES_IN_FLIGHT:
            for event in self._reading[0][0]:
                event.synchronize()
            self._reading.popleft()

    def close(self) -> None:
        for _, stream in self.streams:
            stream.synchronize()
        self._reading.clear()
        for backend in self._backends.values():
            backend.close()


@final
class CopyToDevice(Operator):
    """Tensors to a device, on the stage's own stream.

    Args:
        device: ``"cuda"``, ``"cuda:1"``, ``"cpu"`` ...
        copy: make the copy on the CPU too; by default the plan leaves it out there.
    """

    default_name = "copy"
    shareable = False

    def __init__(self, device: torch.device | str | int, copy: bool = False) -> None:
        self.device = _device(device, "CopyToDevice")
        self.copy = copy
        self._copies: _Copies | None = None
        self._wait = True

    def config(self) -> dict[str, Any]:
        return {}  # where data lies does not change what is delivered

    def bypass(self) -> str | None:
        if self.device.type == "cpu" and not self.copy:
            return "the device is the CPU, where the batch lies already"
        return None

    def reads_pinned(self) -> bool:
        return self.device.type == "cuda"

    def open(self, context: Context) -> None:
        self._copies = _Copies(slots_on([self.device]), context.stage)
        self._wait = context.read_by_stages

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    def process(self, chunk: Chunk) -> Chunk:
        assert self._copies is not None
        chunk.keys = chunk.keys
        backend, stream = self._copies.streams[0]
        source = chunk.data
        chunk.data, event = copy_tree(source, backend, stream)
        self._copies.hold([event], source)
        if self._wait:
            event.synchronize()
        else:
            chunk.ready = (*chunk.ready, event)
        return chunk


@final
class Scatter(Operator):
    """A slice of each batch for each device, copied straight from the host: the loader yields a ``pg.Scattered``.

    Rows are cut as ``torch.chunk`` does (9 over 4 gives 3, 3, 3); lists with one entry per row are cut too; a
    0-dim tensor and ``pg.replicas.Whole`` go to every device. ``CopyToDevice`` right before it is left out.

    Args:
        devices: one per slice; the same one may be named several times.
        copy: make copies on CPU slots too; by default their slices are views of the batch.
    """

    default_name = "scatter"
    needs = "batch"
    shareable = False

    def __init__(self, devices: Sequence[torch.device | str | int], copy: bool = False) -> None:
        if isinstance(devices, str) or not devices:
            raise GraphError(f"Scatter: devices must be a sequence of at least one device, got {devices!r}")
        self.devices = tuple(_device(device, "Scatter") for device in devices)
        self.copy = copy
        self._copies: _Copies | None = None

    def config(self) -> dict[str, Any]:
        return {"parts": len(self.devices)}

    def reads_pinned(self) -> bool:
        return any(device.type == "cuda" for device in self.devices)

    def open(self, context: Context) -> None:
        self._copies = _Copies(slots_on(self.devices), context.stage)

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    def process(self, chunk: Chunk) -> Chunk:
        assert self._copies is not None
        chunk.keys = chunk.keys
        for event in chunk.ready:
            event.synchronize()
        batch = chunk.data
        rows = rows_of(batch, 0, "batch")
        sizes = chunk_sizes_for(len(chunk.rows) if rows is None else rows, len(self.devices))
        parts: list[Any] = []
        ready: list[Event | None] = []
        for part, (backend, stream) in zip(cut(batch, sizes, lists=True), self._copies.streams, strict=False):
            opened = map_tree(lambda leaf: leaf.value if isinstance(leaf, Whole) else leaf, part)
            if backend.device.type == "cpu" and not self.copy:
                parts.append(opened)
                ready.append(None)
            else:
                copied, event = copy_tree(opened, backend, stream)
                parts.append(copied)
                ready.append(event)
        events = [event for event in ready if event is not None]
        self._copies.hold(events, batch)
        chunk.data = Scattered(parts, self.devices[: len(parts)], ready)
        chunk.ready = tuple(events)
        return chunk
