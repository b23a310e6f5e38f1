"""Samples a running loader: numbers for loggers, and ranges for profilers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from pipegraph.errors import GraphError, shown
from pipegraph.integers import amount, flag

from .values import Profile, Watched

Log = Callable[[Mapping[str, float], int], None]

logger = logging.getLogger("pipegraph")


class Recording:
    """``pg.record(...)``: watches a loader in a ``with`` block, from a thread of its own.

    Args:
        loader: running or not yet.
        log: called with plain numbers by name and the number of batches delivered so far, such as
            ``lambda numbers, step: wandb.log({**numbers}, step=step)``; in the recording's thread, never twice at once.
            One that raises is called no more, and the error is logged.
        ranges: show each stage's work under its name in ``torch.profiler`` (as ``record_function`` does) and, with
            CUDA, as an NVTX range, until the block ends. It must begin before the loader's first pass. Worker threads
            are recorded by a profiler with ``profile_all_threads``; stages in other processes are left out.
        every: seconds between two calls of ``log``, at least 0.05.

    Raises:
        GraphError: ``loader`` is none, or ``every`` is too short; in ``__enter__``, ``ranges=True`` and the loader has
            been iterated already.

    ::

        with pg.record(loader, log=lambda numbers, step: wandb.log({**numbers}, step=step)):
            for batch in loader: ...
    """

    def __init__(
        self, loader: Watched, *, log: Log | None = None, ranges: bool = False, every: float = 1.0
    ) -> None:
        if not hasattr(loader, "profile"):
            raise GraphError(f"record: expected a loader, as graph.loader() makes it, got {shown(loader)}")
        self._loader = loader
        self._log = log
        self._ranges = flag(ranges, "record: ranges")
        self._every = min(amount(every, "record: every (seconds)", 0.05, GraphError), threading.TIMEOUT_MAX)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pipegraph-recorder", daemon=True)
        self._last: Profile | None = None

    def __enter__(self) -> Self:
        if self._ranges:
            self._loader._show_ranges(True)
        if self._log is not None:
            self._last = self._loader.profile()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._over.set()
            self._thread.join()
            self._look(self._log)
        if self._ranges:
            self._loader._show_ranges(False)

    def _watch(self) -> None:
        while self._log is not None and not self._over.wait(self._every):
            self._look(self._log)

    def _look(self, log: Log) -> None:
        self._last = found = self._loader.profile(self._last)
        try:
            log(found.scalars(), self._loader.profile().items)
        except Exception:
            logger.exception("record: log= raised, and is called no more")
            self._log = None


record = Recording
