"""Stands in a worker's thread for a run of stages that live in one process.

To the engine the run is its first stage, with the others' work done in the same call. What belongs to each stage by
itself comes back beside the rows: keys that it has fixed, its failures, its figures, and which stage was at work when
the process died or an item took too long.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from pipegraph.bundle import UNNAMED, Bundle, named
from pipegraph.chunk import Chunk
from pipegraph.engine.meter import Meter
from pipegraph.engine.process.contract import Call, Died, Overdue
from pipegraph.engine.process.remote_kinds import RemoteMap, RemoteSource
from pipegraph.engine.process.remote_operator import Deaths, Remote, clamped
from pipegraph.engine.process.run_worker import FailedRow, Figures


class ProcessRun(Remote):
    """Mixed into what stands in for the first stage.

    Attributes:
        failed_in: number of the stage that the last error is of.
        others_ns: time that the other stages have worked.
    """

    failed_in = 0
    others_ns = 0
    _names: Sequence[str] = ()
    _meters: Sequence[Meter] = ()

    def follow(self, names: Sequence[str], meters: Sequence[Meter]) -> None:
        """The stages of the run, the first one included, and one meter for each."""
        self._names, self._meters = names, meters
        self.begin_bundle()

    def begin_bundle(self) -> None:
        self._ready: deque[Any] = deque()  # rows that were made behind one that failed
        self._deaths = Deaths()
        self._overtime: dict[int, Overdue] = {}
        self._alone = False  # one of the rows cannot be sent there or back: one at a time

    def run_into(self, made: list[Any], bundle: Bundle, stop: int) -> None:
        """Append what the run makes of a bundle's rows (of a source: indices) until one fails; fixes their names."""
        while len(made) < stop:
            if not self._ready:
                self._ready.extend(self._rows(bundle, len(made), stop))
            row = self._ready.popleft()
            if row.__class__ is FailedRow:
                raise self._failure(row)
            made.append(row)

    def _rows(self, bundle: Bundle, at: int, stop: int) -> list[Any]:
        """At least one row from ``at`` on."""
        if self._alone:
            stop = at + 1
        while True:
            if at in self._overtime:
                self._identify(bundle, at, self._overtime[at].member)
                raise self._late(self._overtime[at])
            part = bundle if (at, stop) == (0, len(bundle.lineages)) else bundle.part(at, stop)
            try:
                rows, names, figures = self._host.call("run", part, at)
                break
            except Died as died:
                row = clamped(died.row, at, stop)
                if self._deaths.blamed(row):
                    self._identify(bundle, row, died.member)
                    raise self._blame(died) from None
                if row >= 0:
                    # What was made before it went with the process and is made again; then it comes first.
                    stop = row if row > at else row + 1
            except Overdue as overdue:
                row = max(at, clamped(overdue.row, at, stop))
                self._overtime[row] = overdue
                stop = max(row, at + 1)
            except Exception:  # of the way there or back
                if stop == at + 1:
                    self.failed_in = len(self._names) - 1
                    raise
                self._alone, stop = True, at + 1
        self._note(bundle, at, names, figures)
        return list(rows) if rows.__class__ is list else list(rows.rows())

    def _identify(self, bundle: Bundle, row: int, member: int) -> None:
        """A key that a stage has fixed went with the process that died in one behind it: learn it anew."""
        if row >= 0 and member:
            with contextlib.suppress(Exception):
                _, names, figures = self._host.call("run", bundle.part(row, row + 1), row, member)
                self._note(bundle, row, names, figures)

    def _note(self, bundle: Bundle, at: int, names: list[Any] | None, figures: Figures) -> None:
        if names is not None:
            known = [UNNAMED] * len(bundle.lineages) if bundle.names is None else list(bundle.names)
            known[at : at + len(names)] = names
            bundle.names = known
        self._count(figures, None)

    def call_for(self, chunk: Chunk) -> Call | None:
        """A batch goes as it is; what is sent of a row is not known before its turn."""
        return ("whole", chunk) if chunk.batched else None

    def process(self, chunk: Chunk) -> Chunk:
        if chunk.batched:
            return self._batch(chunk)
        names = None if chunk._keys is None else [chunk._keys[0]]
        one = Bundle(
            [chunk.data], chunk.lineages, chunk.epoch, chunk.before, names, [(chunk.before, chunk.after)]
        )
        self.fill(one)
        self.begin_bundle()
        made: list[Any] = []
        try:
            self.run_into(made, one, 1)
        finally:
            if one.names is not None and one.names[0] is not UNNAMED:
                chunk.keys = (one.names[0],)
        chunk.data = made[0]
        return chunk

    def fill(self, bundle: Bundle) -> None:
        """Turn what the stage was given into what is sent."""
        bundle.names = named(bundle.data, bundle.names)

    def _batch(self, chunk: Chunk) -> Chunk:
        self.failed_in = len(self._names) - 1  # where an error of the way there or back belongs
        made, figures = self._call("whole", chunk)
        self._count(figures, len(chunk.lineages))
        if made.__class__ is FailedRow:
            raise self._failure(made)
        out: Chunk = made
        return out

    def _count(self, figures: Figures, samples: int | None) -> None:
        """``samples`` of each batch; None where rows are counted. The last stage's items count as they leave."""
        for member, (spent_ns, begun, made) in enumerate(figures):
            meter = self._meters[member]
            if member:
                meter.busy_ns += spent_ns
                meter.calls += begun
                self.others_ns += spent_ns
            if member < len(self._meters) - 1:
                meter.items += made
                meter.samples += made if samples is None else made * samples

    def _failure(self, row: FailedRow) -> BaseException:
        self.failed_in = row.member
        error: BaseException = row.error.error()
        return error

    def _stage_of(self, member: int) -> str:
        self.failed_in = member
        return self._names[member] if self._names else self._stage


class MapRun(ProcessRun, RemoteMap):
    """A run that begins with a one-to-one stage."""


class SourceRun(ProcessRun, RemoteSource):
    """A run that begins with a random-access source."""

    def fill(self, bundle: Bundle) -> None:
        """Positions become indices: here, where samplers draw."""
        bundle.data = self._operator.indices_of(bundle.data, bundle.epoch)
