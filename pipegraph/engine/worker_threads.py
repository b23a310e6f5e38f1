"""The worker threads of a loader, and the run that they work in.

A thread lives until the loader closes, or until its worker is to leave. It works in every run published meanwhile, and
waits between runs.

Invariants, all under ``lock``: once ``closed`` is set no run is published, so the thread that sets it cancels the last
one; no threads are started after that; and every thread ``inside`` a run is counted by the run's ``activity``.
"""

from __future__ import annotations

import logging
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from pipegraph import concurrency
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.run import Run
from pipegraph.engine.stage_worker import Worker

log = logging.getLogger("pipegraph")


class WorkerThreads:
    """See the module docstring. Thread-safe.

    Attributes:
        lock: guards everything here; ``changed`` is called after every change.
        run: the current run.
        run_number: runs published so far.
        closed: whether this is closed: no run and no thread starts any more.
    """

    def __init__(self, graph_name: str) -> None:
        self.lock = concurrency.RLock()
        self.run: Run | None = None
        self.run_number = 0
        self.closed = False
        self._prefix = f"pipegraph-{graph_name}-"
        self._threads: list[concurrency.Thread] = []
        self._ready: set[concurrency.Thread] = set()  # whose worker has opened its operator
        self._inside: set[concurrency.Thread] = set()  # of these, the ones in the current run
        self._ended: set[concurrency.Thread] = set()  # which have finished
        self._names: dict[int | None, str] = {}  # of all so far, by identity
        self._waiting: list[concurrency.Lock] = []  # of the calls of ``wait_until``

    # -- waiting -------------------------------------------------------------------------------

    def changed(self) -> None:
        """Let all calls of :meth:`wait_until` check again. The caller holds the lock."""
        for waiting in self._waiting:
            with suppress(RuntimeError):  # woken before, by a call that was interrupted
                waiting.release()
        self._waiting.clear()

    def wait_until(self, condition: Callable[[], Any], timeout: float = math.inf) -> bool:
        """Blocks until ``condition()`` is true, at most ``timeout`` seconds; returns whether it is.

        It is called under the lock, which the caller does not hold. Not a ``Condition``: Ctrl-C can leave its
        ``wait`` without the lock, and its ``with`` with the lock.
        """
        deadline = concurrency.monotonic() + timeout
        while True:
            waiting = concurrency.Lock()
            waiting.acquire()
            with self.lock:
                left = deadline - concurrency.monotonic()
                if condition():
                    return True
                if left <= 0:
                    return False
                self._waiting.append(waiting)
            waiting.acquire(timeout=-1 if left == math.inf else left)

    # -- starting ------------------------------------------------------------------------------

    def make(self, stage: str, index: int, life: Callable[[], None]) -> concurrency.Thread:
        """A worker's thread, not started yet."""
        return concurrency.Thread(
            target=self._live, args=(life,), name=f"{self._prefix}{stage}-{index}", daemon=True
        )

    def launch(
        self, threads: list[concurrency.Thread], failed: Callable[[concurrency.Thread, BaseException], None]
    ) -> None:
        """Start threads, unless this is closed; ``failed`` is called under the lock for each that cannot be started.

        They are started from a helper thread: Ctrl-C, raised in the main thread only, in the middle of ``Thread.start``
        would leave a thread that may or may not run. ``start_new_thread`` is one C call: it happens or it does not.
        """
        concurrency.start_new_thread(self._launch, (threads, failed))

    def _launch(
        self, threads: list[concurrency.Thread], failed: Callable[[concurrency.Thread, BaseException], None]
    ) -> None:
        with self.lock:
            if self.closed:
                return
            self._threads = [thread for thread in self._threads if thread not in self._ended]
            self._ended.clear()
            for thread in threads:
                try:
                    thread.start()
                except BaseException as error:
                    failed(thread, error)
                else:
                    self._threads.append(thread)
                    name = thread.name.removeprefix(self._prefix)
                    self._names[thread.ident] = " ".join(name.rsplit("-", 1))
            self.changed()

    def _live(self, life: Callable[[], None]) -> None:
        try:
            life()
        finally:
            with self.lock:
                self._ended.add(concurrency.current_thread())
                self.changed()

    # -- runs ----------------------------------------------------------------------------------

    def publish(self, run: Run) -> None:
        """Let all ready threads work in a run.

        Raises:
            Cancelled: this is closed.
        """
        with self.lock:
            if self.closed:
                raise Cancelled
            run.activity.attach(len(self._ready))
            # At once: interrupted in between, the next call could wait for threads that are not inside.
            self.run, self._inside, self.run_number = run, set(self._ready), self.run_number + 1
            self.changed()

    def enter(self) -> int:
        """The calling thread's worker is ready, and joins the current run, if any. Returns the number of the run before
        the first that it works in."""
        with self.lock:
            self._ready.add(concurrency.current_thread())
            self.changed()
            if self.run is None:
                return self.run_number
            self.run.activity.attach()
            self._inside.add(concurrency.current_thread())
            return self.run_number - 1

    def serve(
        self, worker: Worker, seen: int, work: Callable[[Run], None], leaving: Callable[[Run], None]
    ) -> None:
        """Work in every run after number ``seen``, until this is closed or the worker is to leave.

        Args:
            work: returns when the worker is to leave; an exception from it ends the run.
            leaving: called with the run, after the worker has left it for good.
        """
        leaves = False
        while not leaves:
            self._await_next(worker, seen)
            with self.lock:
                if self.closed:
                    return
                if self.run_number == seen:
                    self._leave(worker)
                    return
                seen, run = self.run_number, self.run
            assert run is not None
            try:
                work(run)
            except Cancelled:
                pass
            except BaseException as error:
                run.fail(error)
            finally:
                with self.lock:
                    self._inside.discard(concurrency.current_thread())
                    leaves = worker.leaves
                    if leaves:
                        self._leave(worker)
                    self.changed()
                if leaves:
                    leaving(run)
                run.activity.pause()
                run = None

    def _await_next(self, worker: Worker, seen: int) -> None:
        self.wait_until(lambda: self.run_number != seen or self.closed or worker.leaves)

    def _leave(self, worker: Worker) -> None:
        """Keep the calling thread's worker out of further runs; under the lock."""
        self._ready.discard(concurrency.current_thread())
        worker.opened = False

    def await_left(self, warn_after_s: float) -> bool:
        """Blocks until every thread has left the cancelled run; logs which ones have not after ``warn_after_s``.
        False once closed."""
        with self.lock:
            self.changed()  # a ``publish`` that was interrupted may not have come to it
        if self.wait_until(lambda: not self._inside or self.closed, warn_after_s):
            stuck = []
        else:
            with self.lock:
                stuck = list(self._inside)
        for thread in stuck:
            log.warning(
                "stage %r: a new pass waits for its worker, which is still in the one before; it stands at:\n%s",
                *(self._stage_of(thread), stack_of(thread)),
            )
        self.wait_until(lambda: not self._inside or self.closed)
        with self.lock:
            if not self.closed:
                self.run = None
            return not self.closed

    # -- closing -------------------------------------------------------------------------------

    def join(self, deadline: float) -> Iterator[tuple[str, concurrency.Thread]]:
        """Join every thread; yields ``(stage, thread)`` for those still running at ``deadline``.

        Called again, it continues where an interrupted call stopped.
        """
        while self._threads:
            thread = self._threads[-1]
            if not self._joined(thread, deadline):
                yield self._stage_of(thread), thread
            if thread in self._threads:
                self._threads.remove(thread)

    def _joined(self, thread: concurrency.Thread, deadline: float) -> bool:
        if thread is concurrency.current_thread():
            return True
        # Not a timed join: if Ctrl-C interrupts it, a running thread is marked as stopped (CPython 90882).
        left = max(0.0, deadline - concurrency.monotonic())
        ended = self.wait_until(lambda: thread in self._ended or not thread.is_alive(), left)
        if ended:
            thread.join()
        return ended

    # -- inspection ----------------------------------------------------------------------------

    def names(self) -> dict[int | None, str]:
        """``"stage worker"`` by thread identity, of threads that have ended too."""
        with self.lock:
            return dict(self._names)

    def _stage_of(self, thread: concurrency.Thread) -> str:
        return thread.name.removeprefix(self._prefix).rpartition("-")[0]


def stack_of(thread: concurrency.Thread | None) -> str:
    """The current stack of a thread, as text."""
    if thread is None:
        return ""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(no stack)\n"
