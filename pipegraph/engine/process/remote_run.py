"""The proxy, in a worker's thread, of several fused stages that run in one process.

To the engine they are the first stage, and the others' work is done in the same call. Each stage's own data comes back
with the rows: the keys that it fixed, its failures, its counters, and which stage was at work when the process died or
an item took too long.
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
    """Mixin for the proxy of the first stage.

    Attributes:
        failed_in: number of the stage that raised the last error.
        others_ns: nanoseconds that the other stages have worked.
    """

    failed_in = 0
    others_ns = 0
    _names: Sequence[str] = ()
    _meters: Sequence[Meter] = ()

    def follow(self, names: Sequence[str], meters: Sequence[Meter]) -> None:
        """Set the names of the stages, including the first, and their meters."""
        self._names, self._meters = names, meters
        self.begin_bundle()

    def begin_bundle(self) -> None:
        self._ready: deque[Any] = deque()  # results of rows after a failed one
        self._deaths = Deaths()
        self._overtime: dict[int, Overdue] = {}
        self._alone = False  # one of the rows cannot be sent: send them one at a time

    def run_into(self, made: list[Any], bundle: Bundle, stop: int) -> None:
        """Append the results for a bundle's rows (for a source: indices) until one fails; fixes their keys."""
        while len(made) < stop:
            if not self._ready:
                self._ready.extend(self._rows(bundle, len(made), stop))
            row = self._ready.popleft()
            if row.__class__ is FailedRow:
                raise self._failure(row)
            made.append(row)

    def _rows(self, bundle: Bundle, at: int, stop: int) -> list[Any]:
        """The results for at least one row from ``at`` on."""
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
                    # Results before this row were lost with the process: do these again, then it comes first.
                    stop = row if row > at else row + 1
            except Overdue as overdue:
                row = max(at, clamped(overdue.row, at, stop))
                self._overtime[row] = overdue
                stop = max(row, at + 1)
            except Exception:  # an item or its result cannot be sent
                if stop == at + 1:
                    self.failed_in = len(self._names) - 1
                    raise
                self._alone, stop = True, at + 1
        self._note(bundle, at, names, figures)
        return list(rows) if rows.__class__ is list else list(rows.rows())

    def _identify(self, bundle: Bundle, row: int, member: int) -> None:
        """Get a row's key again, which an earlier stage had fixed in the process that died."""
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
        """Batches are sent as they are; for a row the call is not known before its turn."""
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
        """Prepare a bundle's rows for sending."""
        bundle.names = named(bundle.data, bundle.names)

    def _batch(self, chunk: Chunk) -> Chunk:
        self.failed_in = len(self._names) - 1  # an error of sending is attributed to the last stage
        made, figures = self._call("whole", chunk)
        self._count(figures, len(chunk.lineages))
        if made.__class__ is FailedRow:
            raise self._failure(made)
        out: Chunk = made
        return out

    def _count(self, figures: Figures, samples: int | None) -> None:
        """Add to the meters: batches of ``samples``, or rows if None. The last stage's items are counted as sent."""
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
    """The proxy of fused stages that begin with a one-to-one stage."""


class SourceRun(ProcessRun, RemoteSource):
    """The proxy of fused stages that begin with a random-access source."""

    def fill(self, bundle: Bundle) -> None:
        """Turn positions into indices, in the trainer, where samplers draw."""
        bundle.data = self._operator.indices_of(bundle.data, bundle.epoch)
