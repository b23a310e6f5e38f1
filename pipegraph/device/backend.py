"""The contract of a device backend: slots, streams, events, memory.

Everything above this package is written against these classes, never against
a device's own library, so the same code runs on CPU slots, on several slots of
one GPU, and on several GPUs.

The rules are those of CUDA's streams, which all accelerators of torch follow:

- work given to one stream runs in the order given; streams are independent;
- :meth:`Stream.record_event` marks a point of a stream; another stream that
  waits for the event runs nothing given to it later before that point is
  reached, and the host does not wait;
- waiting for an event that was never recorded is no wait;
- a wait holds for the event's latest record at the time of the call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from pipegraph import concurrency
from pipegraph.errors import DeviceError
from pipegraph.stopping import Closing


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one replica: a device and the place's number on that device.

    ``devices=["cuda:0", "cuda:0"]`` are the slots 0 and 1 of one GPU.
    """

    device: torch.device
    index: int = 0

    def __str__(self) -> str:
        return f"{self.device}#{self.index}"


def slots_on(devices: Iterable[torch.device | str | int | Slot]) -> tuple[Slot, ...]:
    """Slots for a list of devices, numbered among those that share a device.

    ``"cuda"`` means ``cuda:0``; an int is an accelerator's ordinal, as in DataParallel.

    >>> [str(slot) for slot in slots_on(["cpu", "cpu"])]
    ['cpu#0', 'cpu#1']
    """
    taken: Counter[torch.device] = Counter()
    found = []
    for device in devices:
        plain = normalised(device.device if isinstance(device, Slot) else device)
        found.append(Slot(plain, taken[plain]))
        taken[plain] += 1
    return tuple(found)


def normalised(device: torch.device | str | int) -> torch.device:
    """The device with its index written out, so that equal devices compare equal.

    Raises:
        DeviceError: ``"accelerator"``, where torch finds none; a negative number.
    """
    if isinstance(device, str) and device.partition(":")[0] == "accelerator":
        here = torch.accelerator.current_accelerator(check_available=True)
        if here is None:
            raise DeviceError(
                f"{device!r}: torch finds no accelerator on this machine; name another device, or 'cpu'"
            )
        device = device.replace("accelerator", here.type)
    if isinstance(device, int):
        if device < 0:
            raise DeviceError(f"device {device}: devices count from 0; the CPU is 'cpu'")
        device = torch.device(torch.accelerator.current_accelerator(True) or "cuda").type + f":{device}"
    plain = torch.device(device)
    if plain.type == "cpu":
        return torch.device("cpu")
    return plain if plain.index is not None else torch.device(plain.type, 0)


def late(source: torch.Tensor) -> bool:
    """Whether a copy may read it after the call: it is pinned, or a device's own.

    Some devices read ordinary memory late too where they are allowed to, when it may be gone.
    """
    return source.device.type != "cpu" or source.is_pinned()


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device, differentiably; the same where it lies there.

    Towards a device the copy is asynchronous, on the current stream. Towards the host it is waited for: who reads host
    memory waits for no stream, and would read what was there before.
    """
    return tensor.to(device, non_blocking=device.type != "cpu" and late(tensor))


class Event(ABC):
    """A point in a stream's work."""

    @abstractmethod
    def wait(self, stream: Stream | None = None) -> None:
        """Make `stream` (default: the current one of the event's device) wait. The host does not."""

    def delivered(self, data: Any) -> None:
        """Make the calling thread's current stream wait, in whose work the delivered ``data`` is read from now on."""
        self.wait()

    @abstractmethod
    def query(self) -> bool:
        """Whether the point has been reached (True if never recorded). Waits for nothing, raises nothing."""

    @abstractmethod
    def synchronize(self) -> None:
        """Make the calling thread wait."""


class Stream(ABC):
    """An ordered line of work on one slot's device."""

    def __init__(self, slot: Slot, name: str, backend: Backend) -> None:
        self.slot = slot
        self.name = name
        self._backend = backend

    def run(self, work: Callable[[], object]) -> None:
        """Call `work` with this stream current: what it gives the device comes next on this stream."""
        with self._backend.use(self):
            work()

    def wait_event(self, event: Event) -> None:
        """Work given after this call runs after `event`. The host does not wait."""
        event.wait(self)

    @abstractmethod
    def record_event(self, event: Event | None = None) -> Event:
        """Record `event` (default: a new one) at the present end of the work, and return it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work given so far."""

    def __repr__(self) -> str:
        return f"<stream {self.name!r} on {self.slot}>"


class PastEvent(Event):
    """A mark of a queue, which was waited for when it was made."""

    def wait(self, stream: Stream | None = None) -> None:
        return None

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class DeviceQueue(Stream):
    """A stream where there are none: the device does what it is given in one order, and a mark waits for all of it."""

    def record_event(self, event: Event | None = None) -> Event:
        self._backend.finish()
        return PastEvent() if event is None else event

    def synchronize(self) -> None:
        self._backend.finish()


class Backend(Closing):
    """Streams, events and memory of one device. Its maker closes it. All methods are thread-safe.

    Here those of the CPU, which has neither streams nor events: who gives it work does the work, so all built on slots
    runs without an accelerator.
    """

    sums_together = False
    """Whether :meth:`sum_together` works over distinct devices of this kind."""
    addressed = True
    """Whether its memory has addresses, so that storages can be cut."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = concurrency.Lock()
        self._streams: list[Stream] = []
        self._queue = DeviceQueue(Slot(device), "current", self)
        self._closed = False

    def stream(self, slot: Slot, name: str) -> Stream:
        """A new stream for `slot`; raises DeviceError if that is on another device, or the backend is closed."""
        if slot.device != self.device:
            raise DeviceError(f"the backend of {self.device} has no stream for slot {slot}")
        stream = self.new_stream(slot, name)
        with self._lock:
            if self._closed:
                raise DeviceError(f"the backend of {self.device} is closed")
            self._streams.append(stream)
        return stream

    def new_stream(self, slot: Slot, name: str) -> Stream:
        """For :meth:`stream`."""
        return DeviceQueue(slot, name, self)

    def event(self) -> Event:
        """A new event, not recorded."""
        return PastEvent()

    def current_stream(self) -> Stream:
        """The stream that the calling thread's work on this device goes to now."""
        return self._queue

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """Make `stream` the calling thread's current one inside a ``with``."""
        return nullcontext()

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """``dst.copy_(src)`` on the current stream, inside ``torch.no_grad()``.

        The bytes of `src` must stay as they are, and those of `dst` unread,
        until an event recorded after this call is reached.
        """
        dst.copy_(src)

    def read_on(self, buffer: torch.Tensor, stream: Stream) -> None:
        """Say that `stream` reads `buffer`, in device memory: freed, it is not given away before that work is done."""

    def random_state(self) -> torch.Tensor:
        """The state of the device's default random number generator, which all its slots share."""
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        """Set that generator's state."""
        torch.set_rng_state(state)

    def seed(self, value: int) -> None:
        """Seed that generator, and no other device's."""
        torch.default_generator.manual_seed(value)

    def finish(self) -> None:
        """Wait for all work of the device."""

    def alloc(self, nbytes: int) -> torch.Tensor:
        """A new uint8 tensor of `nbytes` bytes on the device, its contents undefined."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def sum_together(self, buffers: Sequence[torch.Tensor], streams: Sequence[Stream]) -> None:
        """Sum equal-sized 1-d tensors on distinct devices into all of them, each on its own stream."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait for all streams of this backend."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.synchronize()

    def close(self) -> None:
        """Wait for the streams, and give no more. May be called twice."""
        self._closed = True
        self.synchronize()
        self._streams = []


def here() -> torch.device | None:
    """The accelerator of this machine, without an index; None where there is none."""
    return torch.accelerator.current_accelerator(check_available=True)


def devices() -> list[torch.device]:
    """All accelerators of this machine that this process may use."""
    found = here()
    if found is None:
        return []
    return [torch.device(found.type, number) for number in range(torch.accelerator.device_count())]


def current_device() -> torch.device | None:
    """The calling thread's own accelerator; None where there is none.

    Asking for it would begin to use the accelerator, and a process that uses one cannot fork. Where nobody has begun,
    nobody has chosen another than the first.
    """
    found = here()
    if found is None or not is_initialized():
        return None if found is None else torch.device(found.type, 0)
    return torch.device(found.type, torch.accelerator.current_device_index())


def is_initialized() -> bool:
    """Whether this process may use an accelerator already, so that it must not fork. Touches no driver."""
    built = torch.accelerator.current_accelerator()
    return built is not None and bool(
        getattr(torch.get_device_module(built), "is_initialized", lambda: True)()
    )
