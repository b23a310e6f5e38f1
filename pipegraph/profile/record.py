"""Samples a running loader: figures over time for the report, and a trace.

Moments take bounded memory: the longer the run, the coarser they are.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Self

from pipegraph.errors import GraphError, shown
from pipegraph.integers import amount
from pipegraph.paths import path_of

from .exports import trace_events
from .values import Profile, Watched

MAX_MOMENTS = 720
"""Moments that are kept: as many as a chart has room for."""


@dataclass(frozen=True)
class Moment:
    """A look at a run.

    Attributes:
        at_s, samples, stall_s: since recording began: the time, what was delivered, how long training has waited.
        depths: items in each queue, in the order of ``Profile.channels``.
    """

    at_s: float
    samples: int
    stall_s: float
    depths: tuple[int, ...]


def append(moments: list[Moment], latest: Moment) -> None:
    """Add the next moment; when there are too many, every other one goes."""
    moments.append(latest)
    if len(moments) > MAX_MOMENTS:
        del moments[1:-1:2]


class Recording:
    """``pg.record(...)``: watches a loader in a ``with`` block, from a thread of its own.

    Args:
        loader: running or not yet.
        report: where to write the HTML report when the block ends; needs the ``report`` extra.
        trace: where to write a trace for Perfetto (https://ui.perfetto.dev) when the block ends: a track per worker,
            and one of training, whose steps name their first samples. The last 200,000 events of each kind are kept.
        every: seconds between two looks, at least 0.05.

    Raises:
        GraphError: ``loader`` is none, ``every`` is too short, or a file cannot be written; in ``__enter__``,
            another recording traces it.
        MissingExtraError: the report needs a package that is not installed.

    ::

        with pg.record(loader, report="report.html"):
            for batch in loader: ...
    """

    def __init__(
        self,
        loader: Watched,
        *,
        report: str | Path | None = None,
        trace: str | Path | None = None,
        every: float = 1.0,
    ) -> None:
        if not hasattr(loader, "profile"):
            raise GraphError(f"record: expected a loader, as graph.loader() makes it, got {shown(loader)}")
        every = amount(every, "record: every (seconds)", 0.05, GraphError)
        if report is not None:
            from .report import page_template

            page_template()  # a missing package is an error now
        self._loader = loader
        self._report = None if report is None else _file("report", report)
        self._trace = None if trace is None else _file("trace", trace)
        self._every = every
        self._moments = [Moment(0.0, 0, 0.0, ())]
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._first: Profile | None = None
        self._last: Profile | None = None
        self._begun = 0.0

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise GraphError("record: a recording is used in one with block")
        if self._trace is not None:
            self._loader._trace(True)
        self._begun = perf_counter()
        self._first = self._last = self._loader.profile()
        self._thread = threading.Thread(target=self._watch, name="pipegraph-recorder", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._over.set()
        assert self._thread is not None
        self._thread.join()
        self._look()
        if self._trace is not None:
            events, threads = self._loader._trace(False)
            found = trace_events(events, threads, self._loader.profile().graph)
            self._trace.write_text(json.dumps(found), encoding="utf-8")
        if self._report is not None:
            self._report.write_text(self.render_report(), encoding="utf-8")

    def render_report(self) -> str:
        """The report as a page of HTML, also while the block runs."""
        from .report import render_report

        with self._lock:
            moments = list(self._moments)
        return render_report(self._loader.profile(self._first), moments)

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            self._look()

    def _look(self) -> None:
        found = self._loader.profile(self._last)
        now, depths = perf_counter() - self._begun, tuple(channel.depth for channel in found.channels)
        with self._lock:
            last = self._moments[-1]
            samples, stall_s = last.samples + found.samples, last.stall_s + found.stall_s
            append(self._moments, Moment(now, samples, stall_s, depths))
            self._last = found


def _file(what: str, where: str | Path) -> Path:
    """The file to write at the end. That it cannot be written is said now, and not after an hour of training."""
    path = Path(path_of(where, f"record: {what}"))
    try:
        path.open("ab").close()
    except OSError as error:
        raise GraphError(f"record: {what}={str(where)!r} cannot be written: {error.strerror}") from error
    return path


record = Recording
