"""Row operators: the workers of a stage share the rows of a batch.

So a batch is done as soon as all workers together can do it, and no batch waits for a slow worker. A worker
takes a row of the oldest batch that has one left; if there is none, the next item. While it waits for an item,
a batch opened by another worker wakes it. The worker that does a batch's last row ends the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from time import perf_counter_ns
from typing import Any

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, Failure
from pipegraph.contracts import RowOperator
from pipegraph.engine.kinds.map import MapKind, Process, do_single
from pipegraph.engine.memory import Buffers
from pipegraph.engine.stage.row_intake import rows_of
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Worker
from pipegraph.global_generators import Draws


class RowKind(MapKind):
    """See the module docstring. Elsewhere one worker does all rows of a batch."""

    looks_ahead = False
    judges_rows = True
    stateless = "its workers do the rows of a batch in parallel"

    def loop(self, stage: StageRun, worker: Worker) -> Iterator[Any]:
        return super().loop(stage, worker) if stage.plan.remote else rows_loop(stage, worker)

    def process(self, stage: StageRun, worker: Worker) -> Process:
        return whole_batches(stage, worker)


class _Job:
    """One batch in work. ``taken`` and ``left`` change under the stage's ``jobs_lock``."""

    __slots__ = ("batch", "chunk", "failed", "held", "left", "taken", "ticket")

    def __init__(self, ticket: int, chunk: Chunk, batch: Any) -> None:
        self.ticket = ticket
        self.chunk = chunk
        self.batch = batch
        self.held: Buffers = chunk.buffers
        self.taken = 0
        self.left = len(chunk.row_lineages)
        self.failed: dict[int, BaseException] = {}


def rows_loop(stage: StageRun, worker: Worker) -> Iterator[None]:
    """See the module docstring."""
    inbox, meter, now = stage.inboxes[0], worker.meter, perf_counter_ns
    operator: RowOperator = worker.operator
    process = stage.failures.guard(worker, stage.failures.seeded(operator.process))
    draws = Draws(stage.run.seed, stage.name)
    while True:
        found = _next_row(stage)
        if found is not None:
            job, index = found
            meter.began_ns = now()
            draws.one(job.chunk.epoch, job.chunk.row_lineages[index])
            error = stage.failures.do_row(worker, partial(operator.do_row, job.batch, index))
            meter.worked(now() - meter.began_ns)
            if _row_done(stage, job, index, error):
                meter.calls += 1
                stage.leave(worker, job.ticket, _end(stage, worker, job), job.held)
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
            yield
            continue
        if not item.batched:
            do_single(stage, worker, process, ticket, item, 0, True)
            yield
            continue
        meter.began_ns = now()
        try:
            opened = _Job(ticket, item, operator.begin_batch(item))
        except BaseException as error:
            out = stage.failures.handle(worker, item, error)
            meter.calls += 1
            stage.leave(worker, ticket, out, item.buffers)
            del out  # a failure's traceback refers to this frame
            yield
            continue
        finally:
            meter.worked(now() - meter.began_ns)
        with stage.jobs_lock:
            stage.jobs.append(opened)
        inbox.nudge_all()


def _next_row(stage: StageRun) -> tuple[_Job, int] | None:
    with stage.jobs_lock:
        if not stage.jobs:
            return None
        job = stage.jobs[0]
        index = job.taken
        job.taken += 1
        if job.taken == len(job.chunk.row_lineages):
            stage.jobs.popleft()
        return job, index


def _row_done(stage: StageRun, job: _Job, index: int, error: BaseException | None) -> bool:
    with stage.jobs_lock:
        if error is not None:
            job.failed[index] = error
        job.left -= 1
        return job.left == 0


def _end(stage: StageRun, worker: Worker, job: _Job) -> Any:
    """End a batch: returns the finished batch, its failure, or None if no row is left."""
    operator: RowOperator = worker.operator
    worker.ticket = job.ticket
    meter = worker.meter
    meter.began_ns = perf_counter_ns()
    out: Any
    try:
        kept: list[int] | Failure = list(range(len(job.chunk.row_lineages)))
        if job.failed:
            kept = stage.failures.judge_rows(worker, job.chunk, job.failed)
        if isinstance(kept, Failure):
            out = kept
        else:
            out = operator.end_batch(job.batch, kept) if kept else None
    except BaseException as error:
        out = stage.failures.handle(worker, job.chunk, error)
    meter.worked(perf_counter_ns() - meter.began_ns)
    return out


def whole_batches(stage: StageRun, worker: Worker) -> Process:
    """A ``process`` for a remote row operator: one worker does all rows of a batch, and applies the policy to each."""
    remote, failures = worker.operator, stage.failures

    def process(chunk: Chunk) -> Any:
        if not chunk.batched:
            return remote.process(chunk)
        made, failed = remote.rows(chunk)
        if made is not None:
            return made
        still: dict[int, BaseException] = {}
        for row, error in failed.items():
            last = failures.do_row(worker, partial(remote.row, row), error)
            if last is not None:
                still[row] = last
        kept = failures.judge_rows(worker, chunk, still)
        if isinstance(kept, Failure):
            return kept
        return remote.end(kept) if kept else None

    return process
