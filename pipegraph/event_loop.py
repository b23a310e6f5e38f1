"""An asyncio event loop in a thread of its own: of a stage's async functions, and of a store's client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from pipegraph import concurrency

T = TypeVar("T")


class LoopThread:
    """The thread, which has begun; it ends some time after :meth:`end`.

    Args:
        begin: called in it first.
    """

    def __init__(self, name: str, begin: Callable[[], object] = lambda: None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = concurrency.Thread(target=self._run, args=(begin,), name=name, daemon=True)
        self._thread.start()

    def _run(self, begin: Callable[[], object]) -> None:
        begin()
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a task."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def end(self) -> None:
        """Cancel every task, and end when all have ended; waits for nothing."""
        self.submit(_end())

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()


async def _end() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.stop)
