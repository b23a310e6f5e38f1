"""The threads of a loader's workers, and the run that they are in.

A thread lives until the loader closes, or until its worker is to leave; it works in every run that is published
meanwhile, and waits between two.

Invariants, all under ``lock``: no run is published once ``closed`` is set, so whoever sets it cancels the last one;
threads are started only while it is not set; and who is ``inside`` a run has been counted in by its ``activity``.
"""

from __future__ import annotations

import _thread
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from time import monotonic
from typing import TYPE_CHECKING

from pipegraph.engine.activity import Cancelled

if TYPE_CHECKING:
    from pipegraph.engine.run import Run
    from pipegraph.engine.stage.stage_run import Worker

log = logging.getLogger("pipegraph")


class WorkerThreads:
    """See the module docstring. Thread-safe.

    Attributes:
        lock: guards everything here; ``condition`` is notified of every change. Entered as itself: the condition's
            own ``__exit__`` is Python, in which Ctrl-C would leave it locked.
        run: the current one.
        run_number: runs published so far.
        closed: nothing begins any more.
    """

    def __init__(self, graph_name: str) -> None:
        self.lock = threading.RLock()
        self.condition = threading.Condition(self.lock)
        self.run: Run | None = None
        self.run_number = 0
        self.closed = False
        self._prefix = f"pipegraph-{graph_name}-"
        self._threads: list[threading.Thread] = []
        self._ready: set[threading.Thread] = set()  # those whose worker has opened its operator
        self._inside: set[threading.Thread] = set()  # those of them that are in the current run
        self._ended: set[threading.Thread] = set()  # those that have nothing left to do

    # -- starting ------------------------------------------------------------------------------

    def make(self, stage: str, index: int, life: Callable[[], None]) -> threading.Thread:
        """A thread of a worker, not started."""
        return threading.Thread(
            target=self._live, args=(life,), name=f"{self._prefix}{stage}-{index}", daemon=True
        )

    def launch(
        self, threads: list[threading.Thread], failed: Callable[[threading.Thread, BaseException], None]
    ) -> None:
        """Start threads, unless this is closed; ``failed`` is called under the lock with each that cannot be had.

        Ctrl-C is raised in the main thread only, and in the middle of a ``Thread.start`` it would leave one of which
        nobody knows whether it will ever run. This call, of C, has either happened or not.
        """
        _thread.start_new_thread(self._launch, (threads, failed))

    def _launch(
        self, threads: list[threading.Thread], failed: Callable[[threading.Thread, BaseException], None]
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
            self.condition.notify_all()

    def _live(self, life: Callable[[], None]) -> None:
        try:
            life()
        finally:
            with self.lock:
                self._ended.add(threading.current_thread())
                self.condition.notify_all()

    # -- runs ----------------------------------------------------------------------------------

    def publish(self, run: Run) -> None:
        """Let everybody who is ready work in a run.

        Raises:
            Cancelled: this is closed.
        """
        with self.lock:
            if self.closed:
                raise Cancelled
            run.activity.attach(len(self._ready))
            self._inside = set(self._ready)
            self.run = run
            self.run_number += 1
            self.condition.notify_all()

    def enter(self) -> int:
        """The calling thread's worker is ready: it joins the run there is. Returns the last run that is none of its."""
        with self.lock:
            self._ready.add(threading.current_thread())
            self.condition.notify_all()
            if self.run is None:
                return self.run_number
            self.run.activity.attach()
            self._inside.add(threading.current_thread())
            return self.run_number - 1

    def serve(
        self, worker: Worker, seen: int, work: Callable[[Run], None], leaving: Callable[[Run], None]
    ) -> None:
        """Work in every run after number ``seen``, until the end or until the worker is to leave.

        Args:
            work: returns when the worker is to leave; what it raises ends the run.
            leaving: called with the run that the worker has left for good.
        """
        leaves = False
        while not leaves:
            with self.lock:
                while self.run_number == seen and not self.closed and not worker.leaves:
                    self.condition.wait()
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
                    self._inside.discard(threading.current_thread())
                    leaves = worker.leaves
                    if leaves:
                        self._leave(worker)
                    self.condition.notify_all()
                if leaves:
                    leaving(run)
                run.activity.pause()
                run = None

    def _leave(self, worker: Worker) -> None:
        """The calling thread's worker takes part in no further run; under the lock."""
        self._ready.discard(threading.current_thread())
        worker.opened = False

    def await_left(self, warn_after_s: float) -> bool:
        """Blocks until every thread has left the cancelled run, and says after a while for whom; False once closed."""
        with self.lock:
            left = self.condition.wait_for(lambda: not self._inside or self.closed, warn_after_s)
            stuck = [] if left else list(self._inside)
        for thread in stuck:
            log.warning(
                "stage %r: a new pass waits for its worker, which is still in the one before; it stands at:\n%s",
                *(self._stage_of(thread), stack_of(thread)),
            )
        with self.lock:
            self.condition.wait_for(lambda: not self._inside or self.closed)
            if not self.closed:
                self.run = None
            return not self.closed

    # -- the end -------------------------------------------------------------------------------

    def join(self, deadline: float) -> Iterator[tuple[str, threading.Thread]]:
        """Join every thread; gives those, with their stages, that are still running at ``deadline``.

        It continues where an interrupted one has stopped.
        """
        while self._threads:
            thread = self._threads[-1]
            if not self._joined(thread, deadline):
                yield self._stage_of(thread), thread
            if thread in self._threads:
                self._threads.remove(thread)

    def _joined(self, thread: threading.Thread, deadline: float) -> bool:
        if thread is threading.current_thread():
            return True
        # Not by a join: one that Ctrl-C breaks off leaves a thread that runs marked as stopped (CPython 90882).
        with self.lock:
            left = max(0.0, deadline - monotonic())
            ended = self.condition.wait_for(lambda: thread in self._ended or not thread.is_alive(), left)
        if ended:
            thread.join()
        return ended

    # -- looking -------------------------------------------------------------------------------

    def names(self) -> dict[int, str]:
        """``stage worker`` by the identity of each thread."""
        with self.lock:
            threads = list(self._threads)
        return {
            thread.ident: " ".join(thread.name.removeprefix(self._prefix).rsplit("-", 1))
            for thread in threads
            if thread.ident is not None
        }

    def _stage_of(self, thread: threading.Thread) -> str:
        return thread.name.removeprefix(self._prefix).rpartition("-")[0]


def stack_of(thread: threading.Thread | None) -> str:
    """Where a thread stands now, as text."""
    if thread is None:
        return ""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(no stack)\n"
