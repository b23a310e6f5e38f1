"""To the device: ``Pin``, ``CopyToDevice``, ``Scatter``.

Copies run on a stream of the stage's own. Its output carries an event (``chunk.ready``) that the loader makes
its consumer's current stream wait for: the host never waits. Where an ordinary stage reads the copy, it is
waited for before the chunk leaves, because that stage does not use streams; the loop then waits for what stages
have made of it, if it works on another stream than they.

The fields of a batch go in one copy. Where the stage above has laid them in one slab (``chunk.packed``) that is read
in place; else they are written to one here, in memory that is pinned where the device gains from that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, final

import torch

from pipegraph.batches import map_rows, resolved
from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator, Traits
from pipegraph.device.accelerator import backend_for, offers, unpinned
from pipegraph.device.backend import Backend, Event, Slot, devices, normalised, slots_on
from pipegraph.device.copy import Arrival, copy_tree, held_apart, put_back, tensors_within
from pipegraph.device.packed_copy import Computed, FieldPlace, Landing, Packed, pack, packable, places_for
from pipegraph.device.slabs import aligned, on_device, ring_for
from pipegraph.device.split import (
    Scattered,
    Whole,
    chunk_sizes_for,
    cut,
    map_tree,
    register_scatter,
    rows_of,
    rule_for,
)
from pipegraph.errors import GraphError, shown
from pipegraph.integers import flag
from pipegraph.operators.batch_slabs import exchanged, tensors_of
from pipegraph.tree import bytes_of


def _gains_from_pinned(device: torch.device) -> bool:
    return device in devices() and offers(device).pinned


@final
class Pin(Operator):
    """Copy tensors to pinned host memory, from which an accelerator copies without the host's help.

    Objects are pinned by their own ``pin_memory()``, if they have one. If only copies to a device read the result, all
    fields of a chunk are in one slab, which is reused. Otherwise each tensor is pinned separately, by torch's own
    allocator. The plan leaves this stage out if the stage before it already writes to pinned slabs, or if this machine
    cannot pin memory.
    """

    traits = Traits(in_trainer=True, moves="pinned", needless=unpinned)
    name = "pin"
    depends_on = "item"

    def __init__(self) -> None:
        self._context = Context("")

    def config(self) -> dict[str, Any]:
        return {}  # where data lies does not change what is delivered

    def open(self, context: Context) -> None:
        self._context = context
        self._ring = context.share("slabs", lambda: ring_for(context.memory, context.count, context.device))

    def process(self, chunk: Chunk) -> Chunk:
        chunk.keys = chunk.own_keys
        data = held_apart(chunk.data, None)
        objects = data is not chunk.data
        tensors = tensors_of(data, packable)
        if tensors:
            with on_device(self._context.device):
                if self._context.memory == "pinned":
                    chunk.packed, pinned = pack(tensors, self._ring, torch.Tensor.pin_memory)
                else:
                    pinned = [tensor.pin_memory() for tensor in tensors]
            written = sum(new.nbytes for old, new in zip(tensors, pinned, strict=True) if old is not new)
            self._context.count("bytes_written", written)
            data = exchanged(data, tensors, pinned)
        chunk.data = put_back(data) if objects else data
        return chunk


class Landings:
    """One worker's streams, where its batches land, and where fields are gathered that lie apart."""

    def __init__(self, places: Sequence[Slot], context: Context) -> None:
        self._context = context
        self._backends: dict[torch.device, Backend] = {}
        self._landings: list[Landing] = []
        for slot in places:
            backend = self._backends.get(slot.device)
            if backend is None:
                backend = self._backends[slot.device] = backend_for(slot.device)
            stream = backend.stream(slot, f"{context.stage}-{slot}")
            self._landings.append(Landing(backend, stream, context.count))
        gains = [device for device in self._backends if _gains_from_pinned(device)]
        self._ring = ring_for(*("pinned", context.count, gains[0]) if gains else ("pageable", context.count))

    def send(
        self, place: int, data: Any, packed: Packed | None, in_place: Callable[[torch.Tensor], bool]
    ) -> tuple[Any, Event | None]:
        """The tree on its device, and the event after which it may be read. Returns at once.

        Args:
            place: number of the stream.
            packed: where the tree's tensors lie together, if they do.
            in_place: whether a large tensor is copied from where it lies, rather than gathered with the others.
        """
        landing = self._landings[place]
        arrival: Arrival | None = None
        here = landing.backend.device
        given = data
        consumer = landing.backend.current_stream()
        with landing.backend.use(consumer):
            data = held_apart(given, here)
        objects = data is not given
        if objects:  # what they allocate is the consumer's memory, and so are their copies on its stream
            landing.stream.wait_event(consumer.record_event())
            moved = put_back(data)
            arrival = Arrival(landing.stream.record_event(), landing.backend, [], tensors_within(moved, here))
            landing.hold(arrival, (given, moved))
        tensors = tensors_of(data, packable)
        others = tensors_of(data, lambda t: not packable(t) and (t.device != here or here.type == "cpu"))
        if others:
            copies, copied = copy_tree(others, landing.backend, landing.stream)
            arrival = copied.joined(arrival)
            landing.hold(arrival, (others, copies))
            data = exchanged(data, others, copies)
            self._context.count("copies", len(others))
        if tensors:
            places = None if packed is None else packed.places(tensors)
            if packed is not None and places is not None:
                self._context.count("bytes_written", packed.write_small())
                spans, nbytes, source = [(packed.memory, 0)], packed.nbytes, [packed]
            else:
                places, spans, nbytes, source = self._gather(tensors, in_place)
            arrived, landed = landing.land(spans, places, nbytes, source)
            self._context.count("copies", len(spans))
            self._context.count("bytes_copied", sum(memory.numel() for memory, _ in spans))
            arrival = landed.joined(arrival)  # comes after the others' copies
            data = exchanged(data, tensors, arrived)
        return put_back(data) if objects else data, arrival

    def _gather(
        self, tensors: list[torch.Tensor], in_place: Callable[[torch.Tensor], bool]
    ) -> tuple[list[FieldPlace], list[tuple[torch.Tensor, int]], int, list[Any]]:
        """Places in the order of ``tensors``, the spans to copy, their bytes, and what these spans read."""
        whole = sum(tensor.nbytes for tensor in tensors)
        straight = [
            tensor
            for tensor, place in zip(tensors, places_for(tensors)[0], strict=True)
            if tensor.nbytes and place.strides is None and not place.small_in(whole) and in_place(tensor)
        ]
        places, end = places_for(straight)
        known = {id(tensor): place for tensor, place in zip(straight, places, strict=True)}
        spans = [(bytes_of(tensor), known[id(tensor)].offset) for tensor in straight]
        source: list[Any] = list(straight)
        rest = [tensor for tensor in tensors if id(tensor) not in known]
        if rest:
            start = aligned(end)
            packed, laid = pack(rest, self._ring, lambda tensor: tensor)
            packed.write_small()
            self._context.count("bytes_written", sum(tensor.nbytes for tensor in rest))
            places = packed.places(laid) or []
            known |= {id(t): place.moved(start) for t, place in zip(rest, places, strict=True)}
            spans.append((packed.memory, start))
            source.append(packed)
            end = start + packed.nbytes
        return [known[id(tensor)] for tensor in tensors], spans, end, source

    def landing(self, place: int) -> Landing:
        """The slabs and the stream of a place."""
        return self._landings[place]

    def hand_on(self, chunk: Chunk, events: Sequence[Event], wait: bool) -> None:
        """Note the events after which a chunk may be read; ``wait`` for them where ordinary stages read it."""
        if wait and events:
            for event in events:
                event.wait()  # on an accelerator this thread's stream is the one that stages below use
                event.synchronize()
            backend = self._landings[0].backend
            events = [Computed(backend, backend.current_stream())]  # what stages below make of it comes after
        chunk.ready = (*chunk.ready, *events)

    def close(self) -> None:
        for landing in self._landings:
            landing.close()
        for backend in self._backends.values():
            backend.close()


class _ToDevices(Operator):
    """What `CopyToDevice` and `Scatter` share: landings, which live from ``open`` to ``close``."""

    depends_on = "item"
    _landings: Landings

    def config(self) -> dict[str, Any]:
        return {}  # where data lies, and on how many devices, does not change what is delivered

    def close(self) -> None:
        self._landings.close()


@final
class CopyToDevice(_ToDevices):
    """Copy tensors to a device, on the stage's own stream, all fields of a chunk in one copy.

    Objects are moved by their own ``to(device)``, as torch's trainers do. An object that holds tensors and has no
    ``to`` is refused.

    The copy is in one slab on the device. The slab is reused once no part of it is referenced any more and the streams
    that read it are done. A field smaller than a sixteenth of its batch has its own memory.

    Args:
        device: ``"accelerator"`` for the accelerator of this machine, or torch's name of a device: ``"cuda:1"``,
            ``"mps"``, ``"cpu"`` ...
        copy: whether to copy even if the device is the CPU; by default the plan then leaves the stage out.

    Raises:
        RuntimeError: ``device`` is not the name of a device.
        DeviceError: at the first pass: this machine does not have it.
    """

    name = "copy"

    def __init__(self, device: torch.device | str | int, copy: bool = False) -> None:
        self.device = normalised(device)
        self.copy = flag(copy, "CopyToDevice: copy")
        self._wait = True

    @property
    def traits(self) -> Traits:
        return Traits(
            in_trainer=True,
            one_worker=True,
            moves="device",
            pinned_for=self._pinned_for,
            needless=self._needless,
            notes=self._notes,
        )

    def _needless(self) -> str | None:
        if self.device.type == "cpu" and not self.copy:
            return "the device is the CPU, where the batch already is"
        return None

    def _notes(self) -> list[str]:
        lacking = offers(self.device).lacking if self.device in devices() else None
        return [lacking] if lacking else []

    def _pinned_for(self) -> torch.device | None:
        return self.device if _gains_from_pinned(self.device) else None

    def open(self, context: Context) -> None:
        self._landings = Landings(slots_on([self.device]), context)
        self._wait = context.read_by_stages

    def process(self, chunk: Chunk) -> Chunk:
        chunk.keys = chunk.own_keys
        packed, chunk.packed = chunk.packed, None
        chunk.data, event = self._landings.send(0, chunk.data, packed, self._pinned)
        self._landings.hand_on(chunk, [] if event is None else [event], self._wait)
        return chunk

    def _pinned(self, tensor: torch.Tensor) -> bool:
        return self.device.type != "cpu" and tensor.is_pinned()


@final
class Scatter(_ToDevices):
    """Copy a slice of each batch to each device, directly from the host: the loader yields a ``pg.Scattered``.

    Rows are cut as ``torch.chunk`` does (9 over 4 gives 3, 3, 3). What has rows is decided by the rule of
    ``pipegraph.batches``: lists and arrays are cut too, ``pg.replicas.Whole`` and the rest go to every device.
    ``CopyToDevice`` right before it is left out.
    The rows of a large field that lies in a slab are copied from there; the other fields of a part are gathered and go
    in one copy.

    Args:
        devices: one per slice; a device may be named several times.
        copy: whether slices for the CPU are copies too; by default they are views of the batch.

    Raises:
        GraphError: ``devices`` is empty or a text.
        DeviceError: at the first pass: this machine does not have one of them.
    """

    name = "scatter"
    needs = "batch"

    def __init__(self, devices: Sequence[torch.device | str | int], copy: bool = False) -> None:
        if isinstance(devices, str) or not devices:
            raise GraphError(
                f"Scatter: devices must be a sequence of at least one device, got {shown(devices)}"
            )
        self.devices = tuple(map(normalised, devices))
        self.copy = flag(copy, "Scatter: copy")

    @property
    def traits(self) -> Traits:
        return Traits(in_trainer=True, one_worker=True, moves="slices", pinned_for=self._pinned_for)

    def _pinned_for(self) -> torch.device | None:
        # The parts for the CPU are not copied.
        return self.devices[0] if all(map(_gains_from_pinned, self.devices)) else None

    def open(self, context: Context) -> None:
        self._landings = Landings(slots_on(self.devices), context)

    def process(self, chunk: Chunk) -> Chunk:
        chunk.keys = chunk.own_keys
        for event in chunk.ready:
            event.wait()
        batch, chunk.packed = _marked(chunk), None
        rows = rows_of(batch, 0, "batch")
        sizes = chunk_sizes_for(len(chunk.row_lineages) if rows is None else rows, len(self.devices))
        parts: list[Any] = []
        ready: list[Event | None] = []
        for place, part in enumerate(cut(batch, sizes)):
            opened = map_tree(lambda leaf: leaf.value if isinstance(leaf, Whole) else leaf, part)
            device = self.devices[place]
            if device.type == "cpu" and not self.copy:
                parts.append(opened)
                ready.append(None)
            else:
                in_place = (
                    torch.is_tensor if device.type == "cpu" else torch.Tensor.is_pinned
                )  # all, or pinned ones
                arrived, event = self._landings.send(place, opened, None, in_place)
                parts.append(arrived)
                ready.append(event)
        chunk.data = Scattered(parts, self.devices[: len(parts)], ready, sizes)
        chunk.ready = tuple(event for event in ready if event is not None)
        return chunk


class _Column:
    """A list, tuple or array with an entry per row."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows


def _cut(column: _Column, sizes: Sequence[int], dim: int) -> list[Any]:
    return [column.rows[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


register_scatter(
    _Column, rows=lambda column, dim: len(column.rows), cut=_cut, move=lambda column, device: column
)


def _marked(chunk: Chunk) -> Any:
    """The batch for :func:`cut`, which by itself knows the rows of tensors only."""

    def known(part: Any) -> bool:
        return rule_for(part) is not None

    parts = resolved(chunk.data, chunk.layout, None, known)
    return map_rows(
        lambda part: part if isinstance(part, torch.Tensor) else _Column(part),
        chunk.data,
        parts,
        lambda part: part if known(part) or isinstance(part, Whole) else Whole(part),
    )
