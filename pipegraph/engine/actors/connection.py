"""This process's connection to its Ray cluster, whose end no actor can report: ``ray.shutdown()`` drops all answers."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import ray
from ray._private.worker import global_worker


class Connection:
    """The connection as it is when this is made.

    Args:
        lost: called once, when ``ray.shutdown()`` has ended it, by the thread that does so or by the one that notices.
    """

    def __init__(self, lost: Callable[[], None]) -> None:
        # Ray has no hook for its end, but drops this object at that moment.
        self._end = weakref.finalize(global_worker.function_actor_manager, lost)
        self._end.atexit = False

    @property
    def alive(self) -> bool:
        """Whether Ray can be called; if not, it would start another cluster."""
        if not ray.is_initialized():
            self._end()
        return self._end.alive

    def leave(self) -> None:
        """Notice its end no more."""
        self._end.detach()
