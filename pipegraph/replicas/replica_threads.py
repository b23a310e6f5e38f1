"""One persistent thread per replica."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pipegraph import concurrency
from pipegraph.device import bind_thread
from pipegraph.device.threads import start_thread
from pipegraph.errors import note

Job = Callable[[], Any]


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

    def run(self) -> None:
        job, self.job = self.job, None
        if job is None:
            return
        try:
            self.result = job()
        except BaseException as error:
            self.failure = error
        del job
        self.ended = True
        self.done.put(None)


def _serve(orders: concurrency.SimpleQueue[_Order | None], device: torch.device) -> None:
    bind_thread(device)
    while (order := orders.get()) is not None:
        order.run()
        del order  # an idle thread holds no tensors


class ReplicaThreads:
    """One thread per replica, started once; ended by :meth:`close` or when the object is collected.

    Args:
        names: what failures are to be noted with, one per member: ``"replica 0 on cpu#0"``.
        intra_op: the width of each thread's tensor operations.
        devices: each thread's own, to be made its current one.
    """

    def __init__(self, names: Sequence[str], intra_op: int, devices: Sequence[torch.device]) -> None:
        self._names = tuple(names)
        self._orders: list[concurrency.SimpleQueue[_Order | None]] = [
            concurrency.SimpleQueue() for _ in names
        ]
        self._threads = [
            # They know the queue, not its owner, so that this can be collected.
            start_thread(partial(_serve, orders, device), f"pipegraph-replica-{index}", intra_op)
            for index, (orders, device) in enumerate(zip(self._orders, devices, strict=True))
        ]
        self._end = weakref.finalize(self, _end, self._orders)

    def run(self, jobs: Mapping[int, Job]) -> dict[int, Any]:
        """Run jobs at the same time, each in its member's thread, and wait for all.

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
        self.run(dict.fromkeys(range(len(self._threads)), int))

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
