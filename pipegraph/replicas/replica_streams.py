"""Slot, backend and stream of each replica."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pipegraph.device import Backend, Slot, Stream, backend_for
from pipegraph.device.own_moves import tensors_within
from pipegraph.errors import PipegraphWarning

T = TypeVar("T")

# DataParallel's threshold: below it the smaller device holds the larger one back.
MIN_RATIO = 0.75


class ReplicaStreams:
    """Streams of the replicas, tied to the caller's streams at the edges of each phase.

    The first slot of a device works on the caller's own current stream there,
    so one slot per device needs no events at all. Further slots of an accelerator have streams of their own, where its
    allocator can be notified of what these read. On the CPU every thread is its own stream.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.backends = {device: backend_for(device) for device in dict.fromkeys(s.device for s in slots)}
        warn_if_unequal(list(self.backends.values()))
        self._own: list[Stream | None] = [
            self.backends[slot.device].stream(slot, f"replica-{slot.index}")
            if slot.index > 0 and slot.device.type != "cpu" and self.backends[slot.device].records
            else None
            for slot in slots
        ]

    def bound(self, replica: int, work: Callable[[], T]) -> Callable[[], T]:
        """`work` for another thread, on the replica's stream, after what the caller's streams hold now."""
        slot = self.slots[replica]
        if slot.device.type == "cpu":
            return work
        backend = self.backends[slot.device]
        callers = backend.current_stream()
        stream = self._own[replica]
        if stream is not None:
            stream.wait_event(callers.record_event())

        def run() -> T:
            with backend.use(stream or callers):
                return work()

        return run

    def has_stream(self, replica: int) -> bool:
        """Whether a replica works on a stream of its own."""
        return self._own[replica] is not None

    def reads(self, replica: int, held: Any) -> None:
        """A replica's stream reads the caller's tensors: freed in a backward, they are not given away before."""
        if (stream := self._own[replica]) is not None:
            backend = self.backends[self.slots[replica].device]
            for tensor in tensors_within(held, backend.device):
                backend.read_on(tensor, stream)

    def join(self, replicas: Sequence[int]) -> None:
        """Make the caller's streams wait for the replicas' own."""
        for replica in replicas:
            stream = self._own[replica]
            if stream is not None:
                stream.record_event().wait(self.backends[self.slots[replica].device].current_stream())

    def close(self) -> None:
        for backend in self.backends.values():
            backend.close()


def warn_if_unequal(backends: Sequence[Backend]) -> None:
    """Equal chunks on unequal devices leave the larger ones waiting."""
    for what in ("memory", "multiprocessors"):
        offers = [getattr(backend.facts(), what) for backend in backends]
        if min(offers) / max(offers) < MIN_RATIO:
            named = ", ".join(f"{b.device}: {offer}" for b, offer in zip(backends, offers, strict=True))
            warnings.warn(
                f"the devices differ in {what} ({named}): with equal chunks the smallest holds the others "
                f"back (smallest/largest below {MIN_RATIO})",
                PipegraphWarning,
                stacklevel=4,
            )
