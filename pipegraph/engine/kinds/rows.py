"""Row operators: the workers of a stage share the rows of a batch.

So a batch is done as soon as all workers together can do it. A worker takes its share of the oldest batch's rows,
or what is left of them; if nothing is, the next item. While it waits for an item,
a batch opened by another worker wakes it. The worker that does a batch's last row ends the batch. In a process or an
actor one worker does all rows of a batch.
"""

from __future__ import annotations

from contextlib import suppress

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, Failure
from pipegraph.contracts import RowOperator
from pipegraph.engine.kinds.map import MapKind
from pipegraph.engine.stage.failure_policy import Do, Outcome, outcome_of
from pipegraph.engine.stage.hand_over import hand_over, rows_of
from pipegraph.engine.stage.parallel import ByChunk, do_one
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Loop, Worker
from pipegraph.global_generators import Draws


class RowKind(MapKind):
    """See the module docstring."""

    judges_rows = True
    stateless = "its workers do the rows of a batch in parallel"

    def loop(self, stage: StageRun, worker: Worker) -> Loop:
        return rows_loop(stage, worker)


class _Opened:
    """One batch in work. ``taken``, ``left`` and ``failed`` change under the stage's ``jobs_lock``."""

    __slots__ = ("batch", "chunk", "failed", "left", "rows", "taken", "ticket")

    def __init__(self, ticket: int, chunk: Chunk, batch: object) -> None:
        self.ticket = ticket
        self.chunk = chunk
        self.batch = batch
        self.taken = 0
        self.rows = self.left = len(chunk.row_lineages)
        self.failed: dict[int, BaseException] = {}


class _Rows:
    """The rows of a batch that a worker does, as a block."""

    __slots__ = ("count", "first", "of")

    def __init__(self, of: _Opened, first: int, count: int) -> None:
        self.of, self.first, self.count = of, first, count

    def one(self, index: int) -> Chunk:
        return self.of.chunk.row(self.first + index, None)


def rows_loop(stage: StageRun, worker: Worker) -> Loop:
    """See the module docstring."""
    inbox, remote = stage.inboxes[0], stage.plan.remote
    operator: RowOperator = worker.operator
    do = worker.operator.do if remote else ByChunk(stage, operator.process).do
    draws = Draws(stage.run.seed, stage.name)

    def do_rows(rows: _Rows, at: int) -> Outcome:
        opened, stop = rows.of, rows.first + rows.count
        made: list[None] = []
        try:
            if not at:
                with suppress(Exception):  # row by row it comes again, and is that row's
                    operator.do_rows(opened.batch, rows.first, stop)
            for row in range(rows.first + at, stop):
                draws.one(opened.chunk.epoch, opened.chunk.row_lineages[row])
                operator.do_row(opened.batch, row)
                made.append(None)
        except BaseException as error:
            return made, error
        return made, None

    while True:
        found = _next_rows(stage)
        if found is not None:
            if _done(stage, worker, found, do_rows):
                _end(stage, worker, found.of)
                yield
            continue
        ticket, item = inbox.take(1, other_work=lambda: bool(stage.jobs))
        if ticket < 0:
            continue
        worker.ticket = ticket
        if item.__class__ is Bundle:
            (item,) = rows_of(item, stage.run.account)
        if item.__class__ is not Chunk:
            stage.sender.token(ticket, item)
        elif not item.batched:
            do_one(stage, worker, do, ticket, item)
        else:
            batch, error = worker.meter.timed(outcome_of, operator.begin_batch, item)
            if error is not None:
                _leave(stage, worker, ticket, item, stage.failures.handle(worker, item, error))
                error = None  # its traceback refers to this frame
            elif remote:
                opened = _Opened(ticket, item, *batch)
                _done(stage, worker, _Rows(opened, 0, opened.rows), do)
                _end(stage, worker, opened)
            else:
                with stage.jobs_lock:
                    stage.jobs.append(_Opened(ticket, item, *batch))
                inbox.nudge_all()
                continue
        yield


def _next_rows(stage: StageRun) -> _Rows | None:
    with stage.jobs_lock:
        if not stage.jobs:
            return None
        opened = stage.jobs[0]
        first = opened.taken
        opened.taken = min(opened.rows, first - (-opened.rows // stage.plan.workers))
        if opened.taken == opened.rows:
            stage.jobs.popleft()
        return _Rows(opened, first, opened.taken - first)


def _done(stage: StageRun, worker: Worker, rows: _Rows, do: Do) -> bool:
    """Do rows of a batch; returns whether all of it is done."""
    opened = rows.of

    def answer(error: BaseException, at: int) -> None:
        """Keep the error: the policy is applied to the rows of a batch in order."""
        stage.failures.pass_on(error)
        with stage.jobs_lock:
            opened.failed[rows.first + at] = error

    for _ in stage.failures.with_policy(worker, rows, do, answer):
        pass
    with stage.jobs_lock:
        opened.left -= rows.count
        return opened.left == 0


def _end(stage: StageRun, worker: Worker, opened: _Opened) -> None:
    """Send the finished batch, or its failure; nothing if no row is left."""
    operator: RowOperator = worker.operator
    failures, chunk = stage.failures, opened.chunk
    worker.ticket = opened.ticket
    for row, error in sorted(opened.failed.items()):
        failure = failures.handle(worker, chunk.row(row, None), error, row)
        if failure is not None:
            opened.failed.clear()
            _leave(stage, worker, opened.ticket, chunk, failure)
            return
    kept = [row for row in range(opened.rows) if row not in opened.failed]
    opened.failed.clear()  # the errors' tracebacks refer to it
    out: Chunk | Failure | None = None
    if kept:
        made, failed = worker.meter.timed(outcome_of, operator.end_batch, opened.batch, kept)
        out = made[0] if failed is None else failures.handle(worker, chunk, failed)
        del failed
    _leave(stage, worker, opened.ticket, chunk, out)
    del out


def _leave(stage: StageRun, worker: Worker, ticket: int, chunk: Chunk, out: Chunk | Failure | None) -> None:
    worker.meter.calls += 1
    worker.meter.dropped += out is None
    hand_over(stage, worker, ticket, out, chunk.buffers)
