"""CUDA backend: the only module that mentions ``torch.cuda``.

Several slots may share one GPU, each with streams of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.cuda.nccl

from pipegraph import concurrency
from pipegraph.device.backend import Backend, DeviceFacts, Event, MemoryKind, Slot, Stream, normalised
from pipegraph.errors import DeviceError


def is_available() -> bool:
    """Whether a CUDA device can be used."""
    return torch.cuda.is_available()


def devices() -> list[torch.device]:
    """All GPUs of this machine that this process may use."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def bind_thread(device: torch.device) -> None:
    """Make `device` the calling thread's current one: else what it asks of CUDA makes a context on device 0."""
    torch.cuda.set_device(device)


def is_initialized() -> bool:
    """Whether this process has a CUDA context, so that it must not fork."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """An NVTX range of the calling thread, which Nsight Systems shows; needs a build with CUDA."""
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def has_nccl() -> bool:
    """Whether this build can sum over GPUs with NCCL."""
    return torch.cuda.is_available() and hasattr(torch._C, "_nccl_all_reduce")


def all_reduce(buffers: Sequence[torch.Tensor], streams: Sequence[Stream]) -> None:
    """Sum equal-sized 1-d tensors on distinct GPUs into all of them, each on its own stream."""
    torch.cuda.nccl.all_reduce(  # type: ignore[no-untyped-call]
        [_real(buffer) for buffer in buffers], streams=[_raw(stream) for stream in streams]
    )


def reduce(buffers: Sequence[torch.Tensor], root: int, streams: Sequence[Stream]) -> None:
    """The same sum into the buffer of `root` alone, for half of the bytes."""
    given = [_real(buffer) for buffer in buffers]
    torch.cuda.nccl.reduce(given, output=given[root], root=root, streams=[_raw(stream) for stream in streams])


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """NCCL knows no complex numbers; their sum is that of their two parts."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream the current one, and its device.

    `torch.cuda.stream` alone sets the device back when it is left, which from CUDA 12 on makes a context there: in a
    thread that never chose its device that is device 0. `torch.cuda.device` goes back only where there is a context.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


class CudaEvent(Event):
    """An event without timing: cheaper, and enough for ordering. A thread that waits for it leaves its core to others.

    Without a stream it means the current one of *its* device, whichever device is current.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.raw = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._recorded = False

    def record(self, stream: Stream | None = None) -> None:
        self.raw.record(self._on(stream))
        self._recorded = True

    def wait(self, stream: Stream | None = None) -> None:
        if self._recorded:
            self.raw.wait(self._on(stream))

    def _on(self, stream: Stream | None) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if stream is None else _raw(stream)

    def query(self) -> bool:
        # The call is made for the thread's current device, and would make a context on device 0.
        with torch.cuda.device(self._device):
            return not self._recorded or bool(self.raw.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        if self._recorded:
            with torch.cuda.device(self._device):
                self.raw.synchronize()


class CudaStream(Stream):
    """A CUDA stream; `run` calls its work at once, so errors of the host side are raised there."""

    def __init__(self, slot: Slot, name: str, raw: torch.cuda.Stream) -> None:
        self.slot = slot
        self.name = name
        self.raw = raw

    def run(self, work: Callable[[], object]) -> None:
        with _on(self.raw):
            work()

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        recorded = CudaEvent(self.slot.device) if event is None else event
        recorded.record(self)
        return recorded

    def query(self) -> bool:
        return self.raw.query()

    def synchronize(self) -> None:
        self.raw.synchronize()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"<CudaStream {self.name!r} on {self.slot}>"


def _raw(stream: Stream) -> torch.cuda.Stream:
    if not isinstance(stream, CudaStream):
        raise DeviceError(f"CUDA events are recorded and awaited on CUDA streams, got {stream!r}")
    return stream.raw


class CudaBackend(Backend):
    """Streams and memory of one GPU.

    Raises:
        DeviceError: this machine has no such device.
    """

    def __init__(self, device: torch.device | str | int) -> None:
        self.device = normalised(device)
        if not torch.cuda.is_available() or (self.device.index or 0) >= torch.cuda.device_count():
            raise DeviceError(
                f"device {str(self.device)!r} is not on this machine, which offers "
                f'{torch.cuda.device_count()} CUDA devices: use one of them, or "cpu"'
            )
        self._lock = concurrency.Lock()
        self._streams: list[CudaStream] = []
        self._closed = False

    def stream(self, slot: Slot, name: str) -> Stream:
        if slot.device != self.device:
            raise DeviceError(f"the backend of {self.device} has no stream for slot {slot}")
        stream = CudaStream(slot, name, torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
        with self._lock:
            if self._closed:
                raise DeviceError(f"the backend of {self.device} is closed")
            self._streams.append(stream)
        return stream

    def event(self) -> Event:
        return CudaEvent(self.device)

    def current_stream(self) -> Stream:
        return CudaStream(Slot(self.device), "current", torch.cuda.current_stream(self.device))

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        with _on(_raw(stream)):
            yield

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        with torch.no_grad(), _on(_raw(stream)):
            dst.copy_(src, non_blocking=True)

    def alloc(self, nbytes: int, kind: MemoryKind) -> torch.Tensor:
        if kind == "device":
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        with torch.cuda.device(self.device):  # pinned for this device's context, not device 0's
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=kind == "pinned")

    def released(self, buffer: torch.Tensor) -> None:
        return None

    def read_on(self, buffer: torch.Tensor, stream: Stream) -> None:
        buffer.record_stream(_raw(stream))

    def random_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.device)

    def seed(self, value: int) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.manual_seed(value)

    def facts(self) -> DeviceFacts:
        properties = torch.cuda.get_device_properties(self.device)
        return DeviceFacts(properties.total_memory, properties.multi_processor_count)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            streams, self._streams = self._streams, []
        for stream in streams:
            stream.synchronize()
