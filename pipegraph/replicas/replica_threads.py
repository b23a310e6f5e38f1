"""Persistent threads for replicas: one each on the CPU, one for each accelerator, under the caller's local state."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from pipegraph import concurrency
from pipegraph.device.opening import bind_thread
from pipegraph.errors import ReplicaError, note
from pipegraph.intra_op import narrow

T = TypeVar("T")
Job = Callable[[], Any]


def start_thread(target: Callable[[], object], name: str, intra_op: int = 1) -> concurrency.Thread:
    """Start a daemon thread whose tensor operations use `intra_op` threads. Who calls it ends the thread."""

    def run() -> None:
        narrow(intra_op)
        target()

    thread = concurrency.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class _Order:
    """One job of a thread. Given twice, it is done once: Ctrl-C may have come before the giving was noted."""

    __slots__ = ("done", "ended", "failure", "given", "job", "result")

    def __init__(self, job: Job, done: concurrency.SimpleQueue[None]) -> None:
        self.job: Job | None = job
        self.done = done
        self.given = False
        self.ended = False
        self.result: Any = None
        self.failure: BaseException | None = None

    def run(self, prepare: Job) -> None:
        """Do the job, behind ``prepare``, whose failure is the order's: nobody would hear of it elsewhere."""
        job, self.job = self.job, None
        if job is None:
            return
        try:
            prepare()
            self.result = job()
        except BaseException as error:
            self.failure = error
        del job
        self.ended = True
        self.done.put(None)


def _serve(orders: concurrency.SimpleQueue[_Order | None], device: torch.device) -> None:
    prepare: Job = partial(bind_thread, device)
    while (order := orders.get()) is not None:
        order.run(prepare)
        if order.failure is None:
            prepare = int
        del order  # an idle thread holds no tensors


def lines_of(devices: Sequence[torch.device]) -> list[object]:
    """Whose work goes one after another: replicas on the CPU have a line each, those of one accelerator share one.

    In threads of their own these would change places at every operation of torch's, which lets the interpreter go.
    """
    return [index if device.type == "cpu" else device for index, device in enumerate(devices)]


class ReplicaThreads:
    """The threads of replicas, started once; ended by :meth:`close` or when the object is collected.

    Args:
        names: what failures are to be noted with, one per member: ``"replica 0 on cpu#0"``.
        intra_op: the width of each thread's tensor operations.
        devices: the members' own, to be made the current ones of their threads.
    """

    def __init__(self, names: Sequence[str], intra_op: int, devices: Sequence[torch.device]) -> None:
        self._names = tuple(names)
        lines: dict[object, concurrency.SimpleQueue[_Order | None]] = {}
        self._threads: list[concurrency.Thread] = []
        self._orders: list[concurrency.SimpleQueue[_Order | None]] = []
        for index, (device, line) in enumerate(zip(devices, lines_of(devices), strict=True)):
            if line not in lines:
                lines[line] = concurrency.SimpleQueue()
                # The thread knows the queue, not its owner, so that this can be collected.
                served = partial(_serve, lines[line], device)
                self._threads.append(start_thread(served, f"pipegraph-replica-{index}", intra_op))
            self._orders.append(lines[line])
        self._end = weakref.finalize(self, _end, tuple(lines.values()))

    def run(self, jobs: Mapping[int, Job]) -> dict[int, Any]:
        """Run jobs, each in its member's thread, and wait for all.

        Raises:
            The failure of the lowest failing member, with its own type and
            traceback and a note that names the member. A KeyboardInterrupt of the calling thread is
            raised once all jobs have ended, none of which is left out; a second one at once, as :class:`Abandoned`.
        """
        # Queues in C, because the Python code of futures and conditions can be interrupted while it holds a lock.
        done: concurrency.SimpleQueue[None] = concurrency.SimpleQueue()
        orders = {member: _Order(job, done) for member, job in jobs.items()}
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                for member, order in orders.items():
                    if not order.given:
                        self._orders[member].put(order)
                        order.given = True
                while not all(order.ended for order in orders.values()):
                    wait(done)
                break
            except KeyboardInterrupt as again:
                if interrupt is not None:
                    # Those of one accelerator that wait for their turn do not begin.
                    for order in orders.values():
                        order.job = None
                    raise Abandoned("interrupted twice while replicas still ran") from None
                interrupt = again
        if interrupt is not None:
            raise interrupt
        for member in sorted(orders):
            failure = orders[member].failure
            if failure is not None:
                note_once(failure, f"in {self._names[member]}")
                raise failure
        return {member: order.result for member, order in orders.items()}

    def settle(self) -> None:
        """Wait until no earlier job runs."""
        self.run(dict.fromkeys(range(len(self._orders)), int))

    @property
    def members(self) -> tuple[concurrency.Thread, ...]:
        return tuple(self._threads)

    def close(self, join: bool = True) -> None:
        """End the threads; with ``join=False`` without waiting for jobs that still run."""
        self._end()
        if join:
            for thread in self._threads:
                thread.join()


def _end(orders: Sequence[concurrency.SimpleQueue[_Order | None]]) -> None:
    for line in orders:
        line.put(None)


class Abandoned(KeyboardInterrupt):
    """Interrupted a second time while jobs still ran: their replicas' state is unknown."""


def wait(done: concurrency.SimpleQueue[None]) -> None:
    """Until a job has ended."""
    done.get()


def note_once(failure: BaseException, text: str) -> None:
    """Add a note unless it is there: the same exception object may come out of several waits."""
    if text not in getattr(failure, "__notes__", ()):
        note(failure, text)


@dataclass(frozen=True)
class CallerState:
    """Grad and inference mode, autocast, default device and context variables of a thread.

    They are *entered and left* in the other thread, never set: autocast's
    weight cache is process-wide and is cleared when the outermost autocast of a thread is left.
    """

    context: contextvars.Context
    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    default_device: torch.device | None

    @classmethod
    def capture(cls, device_types: frozenset[str]) -> CallerState:
        """Of the calling thread; autocast for the CPU and the given device types.

        Raises:
            ReplicaError: a dispatch mode, a function mode or saved-tensor hooks are active, which
                other threads would not see.
        """
        modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        strange = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
        if torch._C._len_torch_dispatch_stack() or strange:
            raise ReplicaError(
                "replicas run in other threads, where the active torch mode "
                f"({', '.join(strange) or 'a dispatch mode'}) would be lost: call the executor outside it"
            )
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise ReplicaError(
                "replicas run in other threads, where the active saved-tensor hooks would be lost: enter "
                "them inside the module's forward"
            )
        return cls(
            context=contextvars.copy_context(),
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in sorted(device_types | {"cpu"})
                if _autocasts(kind)
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_device=next(
                (mode.device for mode in reversed(modes) if isinstance(mode, DeviceContext)), None
            ),
        )

    def run(self, work: Callable[[], T]) -> T:
        """Call `work` under this state, in this thread. Each call has a copy of the context variables."""
        return self.context.copy().run(self._run, work)

    def _run(self, work: Callable[[], T]) -> T:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            # Inside inference mode, which turns gradients off by itself.
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            for kind, dtype in self.autocast:
                manager: Any = torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache)
                stack.enter_context(manager)
            return work()


def _autocasts(kind: str) -> bool:
    """Whether autocast is on for a type of device; some know none."""
    try:
        return torch.is_autocast_enabled(kind)
    except RuntimeError:
        return False


@contextmanager
def no_autocast() -> Iterator[None]:
    """The calling thread without the autocast that it may be under."""
    built = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        for kind in ["cpu"] if built is None else ["cpu", built.type]:
            if _autocasts(kind):
                manager: Any = torch.autocast(kind, enabled=False)
                stack.enter_context(manager)
        yield
