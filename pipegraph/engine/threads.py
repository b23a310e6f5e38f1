"""The threads of a loader, and the lock under which everything that they share changes.

What begins here ends with ``join``. No thread starts once ``closed`` is set.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from pipegraph import concurrency


class Threads:
    """See the module docstring. Thread-safe.

    Attributes:
        lock: its holder calls :meth:`changed` after every change.
    """

    def __init__(self, graph_name: str) -> None:
        self.lock = concurrency.RLock()
        self.closed = False
        self._prefix = f"pipegraph-{graph_name}-"
        self._threads: list[concurrency.Thread] = []
        self._ended: set[concurrency.Thread] = set()
        self._names: dict[int | None, str] = {}  # of all so far, by identity
        self._waiting: list[concurrency.Lock] = []  # of the calls of ``wait_until``

    # -- waiting -------------------------------------------------------------------------------

    def changed(self) -> None:
        """Let all calls of :meth:`wait_until` check again. The caller holds the lock."""
        for waiting in self._waiting:
            with suppress(RuntimeError):  # woken before, by a call that was interrupted
                waiting.release()
        self._waiting.clear()

    def wait_until(self, condition: Callable[[], object], timeout: float = math.inf) -> object:
        """Blocks until ``condition()`` is true, at most ``timeout`` seconds; returns its last value.

        It is called under the lock, which the caller does not hold. Not a ``Condition``: Ctrl-C can leave its
        ``wait`` without the lock, and its ``with`` with the lock.
        """
        deadline = concurrency.monotonic() + timeout
        while True:
            waiting = concurrency.Lock()
            waiting.acquire()
            with self.lock:
                left = deadline - concurrency.monotonic()
                found = condition()
                if found or left <= 0:
                    return found
                self._waiting.append(waiting)
            waiting.acquire(timeout=-1 if left == math.inf else left)

    # -- starting ------------------------------------------------------------------------------

    def start(
        self,
        lives: Sequence[tuple[str, int, Callable[[], None]]],
        failed: Callable[[int, BaseException], None],
    ) -> None:
        """Start a thread for each ``(stage, worker, its body)``, unless this is closed; ``failed`` is called under the
        lock with the index of each that cannot be started.

        They are started from a helper thread: Ctrl-C, raised in the main thread only, in the middle of ``Thread.start``
        would leave a thread that may or may not run. ``start_new_thread`` is one C call: it happens or it does not.
        """
        threads = [
            concurrency.Thread(
                target=self._live, args=(life,), name=f"{self._prefix}{stage}-{worker}", daemon=True
            )
            for stage, worker, life in lives
        ]
        concurrency.start_new_thread(self._start, (threads, failed))

    def _start(self, threads: list[concurrency.Thread], failed: Callable[[int, BaseException], None]) -> None:
        with self.lock:
            if self.closed:
                return
            self._threads = [thread for thread in self._threads if thread not in self._ended]
            self._ended.clear()
            for index, thread in enumerate(threads):
                try:
                    thread.start()
                except BaseException as error:
                    failed(index, error)
                else:
                    self._threads.append(thread)
                    self._names[thread.ident] = " ".join(self._told(thread))
            self.changed()

    def _live(self, life: Callable[[], None]) -> None:
        try:
            life()
        finally:
            with self.lock:
                self._ended.add(concurrency.current_thread())
                self.changed()

    # -- ending --------------------------------------------------------------------------------

    def join(self, deadline: float) -> Iterator[tuple[str, concurrency.Thread]]:
        """Join every thread; yields ``(stage, thread)`` for those still running at ``deadline``.

        Called again, it continues where an interrupted call stopped.
        """
        while self._threads:
            thread = self._threads[-1]
            if not self._joined(thread, deadline):
                yield self._told(thread)[0], thread
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
        return bool(ended)

    # -- inspection ----------------------------------------------------------------------------

    def names(self) -> dict[int | None, str]:
        """``"stage worker"`` by thread identity, of threads that have ended too."""
        with self.lock:
            return dict(self._names)

    def _told(self, thread: concurrency.Thread) -> list[str]:
        """A thread's stage and worker."""
        return thread.name.removeprefix(self._prefix).rsplit("-", 1)


def stack_of(thread: concurrency.Thread | None) -> str:
    """The current stack of a thread, as text."""
    if thread is None:
        return ""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(no stack)\n"
