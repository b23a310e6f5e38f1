"""Device memory that batches are copied to: filled by one stream, read by any; and what stages compute there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipegraph.device.backend import Backend, Event, Stream
from pipegraph.device.copy import Arrival
from pipegraph.device.own_moves import tensors_within
from pipegraph.device.packed_copy import FieldPlace
from pipegraph.device.slabs import Lease, SlabRing

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
