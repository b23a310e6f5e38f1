"""``log_every=``: a line about a loader's passes in the log, once in a while."""

from __future__ import annotations

import logging
import weakref
from time import perf_counter
from typing import Any

from .live import line
from .values import Profile, Watched

logger = logging.getLogger("pipegraph")


class LogLines:
    """Logs a line as a chunk is asked for, if ``every`` seconds have passed since the last; starts no thread."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._loader: Any = None
        self._last: Profile | None = None
        self._due = 0.0

    def begins(self, loader: Watched, crew: object) -> None:
        """A pass begins. Rates continue, for only the time in passes counts."""
        if self._last is None:
            self._loader = weakref.proxy(loader)
            self._last, self._due = loader.profile(), perf_counter() + self._every

    def asked(self, items: int) -> None:
        """The training loop asks for the next chunk, after this many."""
        now = perf_counter()
        if now < self._due:
            return
        self._due = now + self._every
        found = self._loader.profile(self._last)
        self._last = self._loader.profile()
        epoch, done = found.measured.in_pass
        logger.info("%s", line(found, f"graph {found.graph!r}, epoch {epoch}, {done:,} delivered: "))
