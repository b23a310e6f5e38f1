"""Persistent threads for replicas: one each on the CPU, one for each accelerator, under the caller's local state."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from pipegraph import concurrency
from pipegraph.device.accelerator import bind_thread
from pipegraph.errors import ReplicaError, note
from pipegraph.torch_modes import narrow

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


@dataclass(eq=False)
class _Order:
    """One job of a thread, and what has become of it."""

    job: Job | None
    done: concurrency.SimpleQueue[None]
    result: Any = None
    failure: BaseException | None = None

    def run(self, device: torch.device) -> None:
        """Do the job in a thread for this device, whose failure is the order's: nobody would hear of it elsewhere."""
        assert self.job is not None
        try:
            bind_thread(device)
            self.result = self.job()
        except BaseException as error:
            self.failure = error
        self.job = None
        self.done.put(None)


def _serve(orders: concurrency.SimpleQueue[_Order | None], device: torch.device) -> None:
    while (order := orders.get()) is not None:
        order.run(device)
        del order  # an idle thread holds no tensors


def lines_of(devices: Sequence[torch.device]) -> list[object]:
    """Whose work goes one after another: replicas on the CPU have a line each, those of one accelerator share one.

    In threads of their own these would change places at every operation of torch's, which lets the interpreter go.
    """
    return [index if device.type == "cpu" else device for index, device in enumerate(devices)]


class ReplicaThreads:
    """The threads of replicas, started once; their owner ends them.

    Args:
        intra_op: the width of each thread's tensor operations.
        devices: the members' own, to be made the current ones of their threads.
    """

    def __init__(self, intra_op: int, devices: Sequence[torch.device]) -> None:
        lines: dict[object, concurrency.SimpleQueue[_Order | None]] = {}
        self.members: list[concurrency.Thread] = []
        self._orders: list[concurrency.SimpleQueue[_Order | None]] = []
        for index, (device, line) in enumerate(zip(devices, lines_of(devices), strict=True)):
            if line not in lines:
                lines[line] = concurrency.SimpleQueue()
                served = partial(_serve, lines[line], device)
                self.members.append(start_thread(served, f"pipegraph-replica-{index}", intra_op))
            self._orders.append(lines[line])
        self._lines = list(lines.values())

    def run(self, jobs: Mapping[int, Job]) -> dict[int, Any]:
        """Run jobs, each in its member's thread, and wait for all.

        Raises:
            The failure of the lowest failing member, with its own type and traceback. A KeyboardInterrupt of the
            calling thread at once: the jobs run on, and :meth:`close` waits for them.
        """
        # Queues in C, because the Python code of futures and conditions can be interrupted while it holds a lock.
        done: concurrency.SimpleQueue[None] = concurrency.SimpleQueue()
        orders = {member: _Order(job, done) for member, job in jobs.items()}
        for member, order in orders.items():
            self._orders[member].put(order)
        for _ in orders:
            done.get()
        for member in sorted(orders):
            if (failure := orders[member].failure) is not None:
                raise failure
        return {member: order.result for member, order in orders.items()}

    def end(self) -> None:
        """End the threads once their jobs have ended; waits for nothing."""
        for line in self._lines:
            line.put(None)

    def close(self) -> None:
        """End the threads, and wait for them."""
        self.end()
        for thread in self.members:
            thread.join()


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
