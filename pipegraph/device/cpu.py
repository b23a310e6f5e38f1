"""CPU backend: one FIFO thread per stream, with real events.

It follows CUDA's rules (see :mod:`pipegraph.device.backend`), so everything
built on slots runs, and is tested, on machines without a GPU. A thread that
has no current stream of its own *is* a stream, the host's: its work runs when
called, so a wait on it makes the thread wait.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pipegraph import concurrency
from pipegraph.device.backend import Backend, DeviceFacts, Event, MemoryKind, Slot, Stream
from pipegraph.device.threads import start_thread
from pipegraph.errors import DeviceError

_CPU = torch.device("cpu")


class _Current(concurrency.local):
    """The calling thread's current CPU stream (None: the host itself), as CUDA keeps one per thread."""

    stream: Stream | None = None


_current = _Current()


class _Ticket:
    """One record of an event: done once its place in the stream is reached."""

    __slots__ = ("_done", "_failure", "_future", "_gate", "seen")

    def __init__(self) -> None:
        self._future: concurrency.Future[None] = concurrency.Future()
        # For threads that users interrupt: Ctrl-C may come while a future's Python code holds its lock.
        self._gate = concurrency.Lock()
        self._gate.acquire()
        self._done = False
        self._failure: BaseException | None = None
        self.seen = False

    def settle(self, failure: BaseException | None) -> None:
        self._failure = failure
        self._done = True
        self._gate.release()
        self._future.set_result(None)

    def done(self) -> bool:
        return self._done

    def result(self) -> None:
        """Wait as the host; raises the failure."""
        with self._gate:
            pass
        if self._failure is not None:
            self.seen = True
            raise self._failure

    def failure_unless(self, stopped: concurrency.Future[None]) -> BaseException | None:
        """Wait as a stream's thread, until done or that stream is stopped; returns the failure."""
        if not self._done:
            concurrency.wait([self._future, stopped], return_when=FIRST_COMPLETED)
        if not self._done:
            return DeviceError("a stream was closed while it waited for an event")
        self.seen = self.seen or self._failure is not None
        return self._failure


@dataclass(slots=True)
class _Item:
    work: Callable[[], object] | None = None
    awaited: _Ticket | None = None
    ticket: _Ticket | None = None


class _Fifo:
    """The queue and thread of one stream; knows nothing of the stream object, so that can be collected."""

    def __init__(self, name: str) -> None:
        self._name = name
        # Re-entrant: `retire` may be called by the garbage collector inside `put`. Taken by itself: Ctrl-C may come
        # between the condition's taking it and the promise to give it back.
        self._lock = concurrency.RLock()
        self._condition = concurrency.Condition(self._lock)
        self._items: deque[_Item] = deque()
        self._thread: concurrency.Thread | None = None
        self._claimed = False
        self._retired = False
        self._stopped: concurrency.Future[None] = concurrency.Future()
        self._failed: list[_Ticket] = []

    def put(self, item: _Item) -> None:
        with self._lock:
            if self._stopped.done():
                raise DeviceError(f"stream {self._name!r} is closed")
            self._items.append(item)
            if self._thread is None:
                self._thread = start_thread(self._loop, f"pipegraph-stream-{self._name}")
            self._condition.notify_all()

    def take_failures(self) -> list[_Ticket]:
        with self._lock:
            failed, self._failed = self._failed, []
        return [ticket for ticket in failed if not ticket.seen]

    def retire(self) -> None:
        """End the thread once all work has run; called by the garbage collector, so it waits for nothing."""
        with self._lock:
            self._retired = True
            self._condition.notify_all()

    def stop(self) -> None:
        """Drop what has not begun."""
        with self._lock:
            if not self._stopped.done():
                self._stopped.set_result(None)
            self._condition.notify_all()

    @property
    def ended(self) -> bool:
        return self._retired and (self._thread is None or not self._thread.is_alive())

    def join(self) -> None:
        thread = self._thread
        if thread is not None and thread is not concurrency.current_thread():
            thread.join()

    def _next(self) -> _Item | None:
        with self._lock:
            while not self._stopped.done():
                if self._items:
                    return self._items.popleft()
                if self._retired and not self._items:
                    return None
                self._condition.wait()
            return None

    def _loop(self) -> None:
        with self._lock:
            if self._claimed:
                return  # Ctrl-C came before another thread, already started, was noted
            self._claimed = True
        failure: BaseException | None = None
        while (item := self._next()) is not None:
            if item.ticket is not None:
                self._settle(item.ticket, failure)
                failure = None
            elif failure is None:
                failure = self._do(item)
            del item  # an idle stream holds no tensor
        closed = DeviceError(f"stream {self._name!r} was closed before this work ran")
        with self._lock:
            dropped = list(self._items)
            self._items.clear()
        for left in dropped:
            if left.ticket is not None:
                left.ticket.settle(closed)

    def _do(self, item: _Item) -> BaseException | None:
        try:
            if item.awaited is not None:
                return item.awaited.failure_unless(self._stopped)
            if item.work is not None:
                item.work()
        except BaseException as error:
            return error
        return None

    def _settle(self, ticket: _Ticket, failure: BaseException | None) -> None:
        if failure is not None:
            with self._lock:
                self._failed = [kept for kept in self._failed if not kept.seen]
                self._failed.append(ticket)
        ticket.settle(failure)


class CpuEvent(Event):
    """An event of the CPU backend."""

    __slots__ = ("_ticket",)

    def __init__(self) -> None:
        self._ticket: _Ticket | None = None

    def record(self, stream: Stream | None = None) -> None:
        (stream or _current.stream or _HOST).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _current.stream or _HOST).wait_event(self)

    def query(self) -> bool:
        return self._ticket is None or self._ticket.done()

    def synchronize(self) -> None:
        if self._ticket is not None:
            self._ticket.result()


def _cpu_event(event: Event | None) -> CpuEvent:
    if event is None:
        return CpuEvent()
    if not isinstance(event, CpuEvent):
        raise DeviceError(f"a CPU stream takes events of the CPU backend, got {type(event).__name__}")
    return event


class CpuStream(Stream):
    """A FIFO thread, started with the first work, ended by the backend's ``close`` or when collected."""

    def __init__(self, slot: Slot, name: str) -> None:
        self.slot = slot
        self.name = name
        self._fifo = _Fifo(name)
        weakref.finalize(self, self._fifo.retire)

    def run(self, work: Callable[[], object]) -> None:
        self._fifo.put(_Item(work=work))

    def wait_event(self, event: Event) -> None:
        ticket = _cpu_event(event)._ticket
        if ticket is not None:
            self._fifo.put(_Item(awaited=ticket))

    def record_event(self, event: Event | None = None) -> Event:
        recorded = _cpu_event(event)
        ticket = _Ticket()
        self._fifo.put(_Item(ticket=ticket))
        recorded._ticket = ticket
        return recorded

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        try:
            self.record_event().synchronize()
        finally:
            unseen = self._fifo.take_failures()
        for failed in unseen:
            failed.result()

    def __repr__(self) -> str:
        return f"<CpuStream {self.name!r} on {self.slot}>"


class _HostStream(Stream):
    """The calling thread as a stream: work runs when given, a wait is the thread's own."""

    slot = Slot(_CPU, 0)
    name = "host"

    def run(self, work: Callable[[], object]) -> None:
        work()

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def record_event(self, event: Event | None = None) -> Event:
        recorded = _cpu_event(event)
        recorded._ticket = None  # everything before has run
        return recorded

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def __repr__(self) -> str:
        return "<host stream>"


_HOST = _HostStream()


class CpuBackend(Backend):
    """Streams and memory of the CPU."""

    device = _CPU

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._streams: weakref.WeakSet[CpuStream] = weakref.WeakSet()
        self._fifos: list[_Fifo] = []  # also of streams that were collected: close joins their threads
        self._closed = False

    def stream(self, slot: Slot, name: str) -> Stream:
        if slot.device != _CPU:
            raise DeviceError(
                f"the CPU backend has no stream for slot {slot}: use backend_for({str(slot.device)!r})"
            )
        stream = CpuStream(slot, name)
        with self._lock:
            if self._closed:
                raise DeviceError("the CPU backend is closed")
            self._streams.add(stream)
            self._fifos = [fifo for fifo in self._fifos if not fifo.ended]
            self._fifos.append(stream._fifo)
        return stream

    def event(self) -> Event:
        return CpuEvent()

    def current_stream(self) -> Stream:
        return _current.stream or _HOST

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        previous = _current.stream
        _current.stream = None if stream is _HOST else stream
        try:
            yield
        finally:
            _current.stream = previous

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        def copy() -> None:
            with torch.no_grad():
                dst.copy_(src)

        stream.run(copy)

    def alloc(self, nbytes: int, kind: MemoryKind) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def read_on(self, buffer: torch.Tensor, stream: Stream) -> None:
        return None  # work given to a stream here keeps its tensors alive itself

    def random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)

    def facts(self) -> DeviceFacts:
        # All slots share the one CPU, so only equality matters here.
        return DeviceFacts(memory=1, multiprocessors=1)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            fifos, self._fifos = self._fifos, []
        # All are stopped before any is joined: one may wait for another's event.
        for fifo in fifos:
            fifo.stop()
        for fifo in fifos:
            fifo.join()
