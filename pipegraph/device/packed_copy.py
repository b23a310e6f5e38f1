"""Packs the fields of a batch into one host slab, so that a single copy moves them all, and lands them on a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipegraph.device.backend import Backend, Event, Stream
from pipegraph.device.copy import Arrival, tensors_within
from pipegraph.device.slabs import Lease, SlabRing, aligned

SMALL_SHARE = 16
"""A field under one part in this many of its slab is copied out on delivery: kept labels must not keep batches."""


@dataclass(frozen=True, slots=True)
class FieldPlace:
    """Where a tensor lies in a slab; ``offset`` and ``nbytes`` in bytes, ``strides`` in elements (None: contiguous)."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None

    def within(self, slab: torch.Tensor) -> torch.Tensor:
        """A view of the place in ``slab`` (uint8, one dimension)."""
        flat = slab[self.offset : self.offset + self.nbytes].view(self.dtype)
        if self.strides is not None:
            return flat.as_strided(self.shape, self.strides, flat.storage_offset())
        return flat if len(self.shape) == 1 else flat.view(self.shape)

    def write(self, tensor: torch.Tensor, slab: torch.Tensor) -> None:
        """Write a tensor of this dtype and shape there."""
        with torch.no_grad():
            self.within(slab).copy_(tensor)

    def moved(self, by: int) -> FieldPlace:
        """The same place, a number of bytes further."""
        return replace(self, offset=self.offset + by)

    def small_in(self, nbytes: int) -> bool:
        """Whether it is a small part of a batch of ``nbytes``."""
        return self.nbytes * SMALL_SHARE < nbytes


def packable(leaf: Any) -> bool:
    """Whether it is a plain dense tensor in host memory: others and subclasses go by themselves."""
    return (
        type(leaf) is torch.Tensor
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not leaf.is_nested
        and not leaf.is_quantized
    )


def places_for(tensors: Iterable[torch.Tensor], start: int = 0) -> tuple[list[FieldPlace], int]:
    """A place for each tensor from byte ``start`` on, at aligned offsets and in this order; and where the last ends.

    Strides of dense tensors are kept (``channels_last``).
    """
    places: list[FieldPlace] = []
    end = start
    for tensor in tensors:
        offset = aligned(end)
        end = offset + tensor.nbytes
        strides = None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        places.append(FieldPlace(offset, tensor.nbytes, tensor.dtype, tuple(tensor.shape), strides))
    return places, end


class Packed:
    """The tensors of a batch and one slab of host memory with a place for each of them.

    Large ones lie there: what is written to them is written to the slab. Small ones lie elsewhere, so that a kept one
    keeps no slab; they are written to their places when the copy is about to read these, as they are then.

    Attributes:
        nbytes: the batch takes this many bytes at the slab's beginning.
    """

    __slots__ = ("_fields", "_lease", "nbytes")

    def __init__(
        self, lease: Lease, tensors: Sequence[torch.Tensor], places: Sequence[FieldPlace], nbytes: int
    ) -> None:
        self._lease = lease  # the slab stays as it is for as long as this lives
        self._fields = {id(tensor): (tensor, place) for tensor, place in zip(tensors, places, strict=True)}
        self.nbytes = nbytes

    @property
    def memory(self) -> torch.Tensor:
        """The batch's bytes: (nbytes,) uint8."""
        return self._lease.slab[: self.nbytes]

    def places(self, tensors: Iterable[torch.Tensor]) -> list[FieldPlace] | None:
        """Where these tensors belong; None unless it knows them all."""
        found = []
        for tensor in tensors:
            known = self._fields.get(id(tensor))
            if known is None:
                return None
            found.append(known[1])
        return found

    def write_small(self) -> int:
        """Write the small tensors to their places; returns the bytes. Several readers may: the outcome is the same."""
        small = [(tensor, place) for tensor, place in self._fields.values() if place.small_in(self.nbytes)]
        for tensor, place in small:
            place.write(tensor, self._lease.slab)
        return sum(place.nbytes for _, place in small)


def pack(
    tensors: Sequence[torch.Tensor], ring: SlabRing, own: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Packed, list[torch.Tensor]]:
    """Write the large ones of some tensors into one slab.

    Args:
        tensors: plain dense ones, in host memory.
        own: gives a small tensor what memory it is to have.

    Returns:
        the batch, and its tensors in the same order: the large ones in the slab, the small ones as ``own`` made them.
    """
    places, nbytes = places_for(tensors)
    lease = ring.lend(ring.take(nbytes))
    made = _laid(lease, tensors, places, nbytes, own)
    return Packed(lease, made, places, nbytes), made


def room_behind(nbytes: int, others: Iterable[torch.Tensor]) -> int:
    """Bytes of a slab that has room for ``others`` behind what fills its first ``nbytes``."""
    return places_for(others, nbytes)[1]


def pack_behind(
    lease: Lease, first: torch.Tensor, others: Sequence[torch.Tensor]
) -> tuple[Packed | None, list[torch.Tensor]]:
    """Lay ``others`` behind ``first``, a tensor of ``lease`` that fills the slab's start.

    Returns:
        the batch of all of them, None where the slab has no room for it; and the others: large ones in the slab.
    """
    places, nbytes = places_for(others, first.nbytes)
    if nbytes > lease.slab.numel():
        return None, list(others)
    made = _laid(lease, others, places, nbytes, lambda tensor: tensor)
    place = FieldPlace(0, first.nbytes, first.dtype, tuple(first.shape), None)
    return Packed(lease, [first, *made], [place, *places], nbytes), made


def _laid(
    lease: Lease,
    tensors: Sequence[torch.Tensor],
    places: Sequence[FieldPlace],
    nbytes: int,
    own: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    made = []
    for tensor, place in zip(tensors, places, strict=True):
        if place.small_in(nbytes):
            made.append(own(tensor))
        else:
            place.write(tensor, lease.slab)
            made.append(lease.tensor(place.dtype, place.shape, place.offset, place.strides))
    return made


COPIES_IN_FLIGHT = 3
"""Copies whose sources are kept while the device may still read them; one more waits for the oldest."""

SPARE_DEVICE_SLABS = 4
"""Free slabs kept on a device, where memory is dear: one just back, one to be filled, and two for jitter."""


class Landing:
    """The slabs of one copy stream on its device. One thread uses it, and it ends with the stream.

    A slab is written again only behind everything that the streams which read it had been given when it came back.
    """

    def __init__(self, backend: Backend, stream: Stream, count: Callable[[str, int], None]) -> None:
        self.backend = backend
        self.stream = stream
        self._ring = SlabRing(self._allocate, SPARE_DEVICE_SLABS, count=count, reused=backend.addressed)
        self._reading: deque[tuple[Event, Any]] = deque()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        slab = self.backend.alloc(nbytes)
        # The new memory may be a block that earlier work of this thread's current stream still uses.
        self.stream.wait_event(self.backend.current_stream().record_event())
        return slab

    def take(self, nbytes: int) -> torch.Tensor:
        """A slab that the stream may write to."""
        return self._ring.take(nbytes, self.stream)

    def lend(self, slab: torch.Tensor) -> tuple[Lease, Arrival]:
        """Start a delivery of a slab that the stream has been given all writes of; and the event after which it may be
        read."""
        lease = self._ring.lend(slab)
        return lease, Arrival(self.stream.record_event(), self.backend, lease.readers, [slab])

    def land(
        self,
        spans: Sequence[tuple[torch.Tensor, int]],
        places: Sequence[FieldPlace],
        nbytes: int,
        source: Any,
    ) -> tuple[list[torch.Tensor], Arrival]:
        """Copy a batch to a slab. Returns at once, unless too many copies are under way.

        Args:
            spans: host memory (uint8, one dimension) and where in the slab it goes: one copy each.
            places: of the batch's tensors in the slab.
            source: is kept until the copies are done: reused earlier, they would read the next batch.

        Returns:
            the tensors, small ones in memory of their own, and the event after which they may be read.
        """
        slab = self._ring.take(nbytes, self.stream)
        lease = self._ring.lend(slab)
        tensors, copied_out = [], []
        # Where other threads wait for the interpreter, each call of torch's may cost a change of thread: few are made.
        with torch.no_grad(), self.backend.use(self.stream):
            for memory, offset in spans:
                self.backend.copy(slab[offset : offset + memory.numel()], memory)
            for place in places:
                if place.nbytes and place.small_in(nbytes):
                    laid = place.within(slab)
                    tensors.append(torch.empty_like(laid))
                    self.backend.copy(tensors[-1], laid)
                    copied_out.append(tensors[-1])
                else:
                    tensors.append(lease.tensor(place.dtype, place.shape, place.offset, place.strides))
        copied = self.stream.record_event()
        self.hold(copied, (source, slab, copied_out))
        return tensors, Arrival(copied, self.backend, lease.readers, (slab, *copied_out))

    def hold(self, copied: Event, source: Any) -> None:
        """Keep ``source`` until ``copied`` is reached."""
        self._reading.append((copied, source))
        while self._reading and self._reading[0][0].query():
            self._reading.popleft()
        while len(self._reading) > COPIES_IN_FLIGHT:
            self._reading[0][0].synchronize()
            self._reading.popleft()

    def close(self) -> None:
        """Wait for the copies under way; the stream and the backend are their maker's to end."""
        self.stream.synchronize()
        self._reading.clear()


class Computed(Event):
    """The end of all work that the stages' stream holds when somebody waits.

    Args:
        stream: of the backend, the current one of the stages' threads, on which they work.
    """

    def __init__(self, backend: Backend, stream: Stream) -> None:
        self._backend = backend
        self._stream = stream

    def wait(self, stream: Stream | None = None) -> None:
        reader = self._backend.current_stream() if stream is None else stream
        if reader != self._stream:
            self._stream.record_event().wait(reader)

    def delivered(self, data: Any) -> None:
        reader = self._backend.current_stream()
        if reader != self._stream:
            self._stream.record_event().wait(reader)
            for tensor in tensors_within(
                data, self._backend.device
            ):  # else the stages would reuse its memory
                self._backend.read_on(tensor, reader)

    def query(self) -> bool:
        return self._stream.record_event().query()

    def synchronize(self) -> None:
        self._stream.record_event().synchronize()
