"""Any accelerator that torch knows, through ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``.

What it offers is asked once per kind of device. Where torch can use no streams or no events of it, work goes to the
device's own queue and a mark waits for the whole device: slower, and right. What CUDA alone has (NCCL, events that
block) stands here too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.cuda.nccl

from pipegraph import concurrency
from pipegraph.device.backend import Backend, Event, Slot, Stream, devices, late, normalised
from pipegraph.errors import DeviceError

UNSUPPORTED = (RuntimeError, AttributeError, TypeError)
"""How torch and a device's module refuse what the device does not have (``NotImplementedError`` is a RuntimeError)."""


@dataclass(frozen=True, slots=True)
class Offers:
    """What an accelerator offers. What it lacks makes a path slower, never wrong.

    Attributes:
        streams: whether a copy can run beside other work, on a stream of its own.
        events: whether streams can be marked and waited for. Without them nothing overlaps.
        pinned: whether torch can pin host memory for it.
        unified: whether it works in the host's own memory, so that there is nothing to pin.
        addressed: whether its memory has addresses, so that a slab can be cut.
    """

    streams: bool
    events: bool
    pinned: bool
    unified: bool = False
    addressed: bool = True

    @property
    def lacking(self) -> str | None:
        """What a copy to it has to do without, in words; None if nothing."""
        if not self.events:
            return "torch can use no streams and events of it: every copy is waited for"
        if not self.streams:
            return "it has one stream only: copies take turns with the model's work"
        return None


# Known without a question, which would make a context on the device.
_KNOWN = {
    "cuda": Offers(streams=True, events=True, pinned=True),
    "mps": Offers(streams=False, events=True, pinned=False, unified=True, addressed=False),
}


def offers(device: torch.device) -> Offers:
    """What one of this machine's accelerators offers."""
    return _KNOWN.get(device.type) or _probed(device)


@functools.cache
def _probed(device: torch.device) -> Offers:
    def marked() -> None:
        event = torch.Event(device)
        event.record(current)
        event.wait(current)
        event.synchronize()

    def cut() -> None:
        memory = torch.empty(2, dtype=torch.uint8, device=device)
        memory.new_empty(0).set_(memory.untyped_storage()[1:], 0, (1,), (1,))  # as a lease cuts a slab

    with torch.accelerator.device_index(device.index):
        current = torch.accelerator.current_stream(device)
        events = _works(marked)
        return Offers(
            streams=events and _works(lambda: torch.Stream(device) != current),
            events=events,
            pinned=_works(lambda: torch.empty(1, pin_memory=True).is_pinned()),
            addressed=_works(cut),
        )


def _works(attempt: Callable[[], object]) -> bool:
    try:
        return attempt() is not False
    except UNSUPPORTED:
        return False


def unpinned() -> str | None:
    """Why host memory is not pinned on this machine; None where it is."""
    found = devices()
    if not found:
        return "no accelerator here, so nothing is pinned"
    if offers(found[0]).unified:
        return f"{found[0].type} works in the host's own memory, so there is nothing to pin"
    return None if offers(found[0]).pinned else f"torch pins no memory for {found[0].type}"


class AcceleratorEvent(Event):
    """An event of a device. Without a stream it means the current one of *its* device, whichever device is current."""

    def __init__(self, backend: AcceleratorBackend) -> None:
        self._backend = backend
        self.raw = backend.raw_event()
        self.recorded = False

    def wait(self, stream: Stream | None = None) -> None:
        if self.recorded:
            self.raw.wait(self._backend.raw_current() if stream is None else raw_of(stream))

    def query(self) -> bool:
        # Asked in a thread that never chose its device, some drivers make a context on device 0.
        with self._backend.current():
            return not self.recorded or bool(self.raw.query())

    def synchronize(self) -> None:
        if self.recorded:
            with self._backend.current():
                self.raw.synchronize()


class AcceleratorStream(Stream):
    """A stream of a device."""

    def __init__(self, slot: Slot, name: str, backend: AcceleratorBackend, raw: torch.Stream) -> None:
        super().__init__(slot, name, backend)
        self.raw = raw

    def record_event(self, event: Event | None = None) -> Event:
        recorded = self._backend.event() if event is None else event
        if not isinstance(recorded, AcceleratorEvent):
            raise DeviceError(
                f"a stream of {self.slot.device} records events of its own kind, got {recorded!r}"
            )
        recorded.raw.record(self.raw)
        recorded.recorded = True
        return recorded

    def synchronize(self) -> None:
        self.raw.synchronize()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AcceleratorStream) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)


def raw_of(stream: Stream) -> torch.Stream:
    """Torch's own stream."""
    if not isinstance(stream, AcceleratorStream):
        raise DeviceError(f"a device's events are awaited on its streams, got {stream!r}")
    return stream.raw


class AcceleratorBackend(Backend):
    """Streams and memory of one device; raises DeviceError if this machine does not have it."""

    def __init__(self, device: torch.device | str | int) -> None:
        super().__init__(normalised(device))
        there = devices()
        if self.device not in there:
            offered = f"offers {', '.join(map(str, there))}" if there else "has no accelerator"
            raise DeviceError(
                f"device {str(self.device)!r} is not on this machine, which {offered}: use one of its devices, or 'cpu'"
            )
        self.index = self.device.index or 0
        self.offers = offers(self.device)
        self.addressed = self.offers.addressed
        self._module: Any = torch.get_device_module(self.device)

    # What a vendor's own classes may do better

    def raw_stream(self) -> torch.Stream:
        """A new stream of torch's."""
        return torch.Stream(self.device)

    def raw_current(self) -> torch.Stream:
        """Torch's current stream of this device."""
        return torch.accelerator.current_stream(self.device)

    def raw_event(self) -> torch.Event:
        """A new event of torch's."""
        return torch.Event(self.device)

    def current(self) -> torch.accelerator.device_index:
        """Make this device the calling thread's current one inside a ``with``."""
        return torch.accelerator.device_index(self.index)

    def new_stream(self, slot: Slot, name: str) -> Stream:
        if not self.offers.events:
            return super().new_stream(slot, name)
        return AcceleratorStream(
            slot, name, self, self.raw_stream() if self.offers.streams else self.raw_current()
        )

    def event(self) -> Event:
        return AcceleratorEvent(self) if self.offers.events else super().event()

    def current_stream(self) -> Stream:
        if not self.offers.events:
            return super().current_stream()
        return AcceleratorStream(Slot(self.device), "current", self, self.raw_current())

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        # `with stream` of torch keeps what was current in the stream object, which several threads may use at a time;
        # and leaving a stream sets the device back, which in a thread without one makes a context on device 0, unless
        # the device is left last: that goes back only where there is a context.
        with self.current():
            if not self.offers.events:
                yield
                return
            previous = torch.accelerator.current_stream(self.index)
            torch.accelerator.set_stream(raw_of(stream))
            try:
                yield
            finally:
                torch.accelerator.set_stream(previous)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src, non_blocking=late(src))

    def read_on(self, buffer: torch.Tensor, stream: Stream) -> None:
        storage: Any = buffer.untyped_storage()
        readers: list[Stream] | None = getattr(storage, "readers", None)
        if readers is not None:  # part of a slab, which its ring gives away, and not torch's allocator
            if stream not in readers:
                readers.append(stream)
        elif self.offers.streams and storage.resizable():  # memory of that allocator
            buffer.record_stream(raw_of(stream))

    def random_state(self) -> torch.Tensor:
        with self.current():
            state: torch.Tensor = self._module.get_rng_state()
            return state

    def set_random_state(self, state: torch.Tensor) -> None:
        with self.current():
            self._module.set_rng_state(state)

    def seed(self, value: int) -> None:
        with self.current():
            self._module.manual_seed(value)

    def finish(self) -> None:
        torch.accelerator.synchronize(self.device)


_NCCL = concurrency.Lock()
"""Held while work is given to NCCL: torch keeps one set of communicators for all threads, and does not guard it."""


class CudaBackend(AcceleratorBackend):
    """A GPU (ROCm's too). A thread that waits for its events leaves its core to others, and NCCL sums over several."""

    sums_together = hasattr(torch._C, "_nccl_all_reduce")

    def __init__(self, device: torch.device | str | int) -> None:
        super().__init__(device)
        self._seen: dict[int, torch.Stream] = {}

    def raw_stream(self) -> torch.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def raw_current(self) -> torch.Stream:
        # torch.cuda.current_stream makes an object each time, which is most of its cost.
        known = torch._C._cuda_getCurrentStream(self.index)
        if (stream := self._seen.get(known[0])) is None:
            stream = self._seen[known[0]] = torch.cuda.current_stream(self.device)
        return stream

    def raw_event(self) -> torch.Event:
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def sum_together(self, buffers: Sequence[torch.Tensor], streams: Sequence[Stream]) -> None:
        # NCCL knows no complex numbers; their sum is that of their two parts.
        given = [torch.view_as_real(each) if each.is_complex() else each for each in buffers]
        raw: Any = [raw_of(stream) for stream in streams]
        with _NCCL:
            torch.cuda.nccl.all_reduce(given, streams=raw)  # type: ignore[no-untyped-call]


def every_device() -> list[torch.device]:
    """All devices of the accelerator, or the CPU where there is none."""
    return devices() or [torch.device("cpu")]


def bind_thread(device: torch.device) -> None:
    """Make a device the calling thread's current one, for a thread that works for it alone."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    if device.type == "cuda":  # else cuBLAS finds no context in a new thread, and warns
        torch.accelerator.current_stream(device).query()


def backend_for(device: torch.device | str | int) -> Backend:
    """A new backend for `device`, to be closed by the caller (it is a context manager).

    Args:
        device: ``"cpu"``, ``"accelerator"``, ``"cuda:1"``, an accelerator's ordinal.

    Raises:
        DeviceError: no such device here.
    """
    plain = normalised(device)
    if plain.type == "cpu":
        return Backend(plain)
    if plain.type == "cuda":
        return CudaBackend(plain)
    return AcceleratorBackend(plain)
