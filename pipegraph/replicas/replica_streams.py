"""Slot, backend and stream of each replica."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

from pipegraph.device import Backend, Slot, Stream, backend_for
from pipegraph.errors import PipegraphWarning

T = TypeVar("T")

# DataParallel's threshold: below it the smaller device holds the larger one back.
MIN_RATIO = 0.75


class ReplicaStreams:
    """Streams of the replicas, tied to the caller's streams at the edges of each phase.

    The first slot of a device works on the caller's own current stream there,
    so one slot per device needs no events at all. Further slots of a GPU have streams of their own.
    On the CPU every thread is its own stream.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.backends = {device: backend_for(device) for device in dict.fromkeys(s.device for s in slots)}
        warn_if_unequal(list(self.backends.values()))
        self._own: list[Stream | None] = [
            self.backends[slot.device].stream(slot, f"replica-{slot.index}")
            if slot.index > 0 and slot.device.type != "cpu"
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
