"""Sources, read in sequence by one worker.

A cursor is the number of the rank's next step.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import index as as_int
from time import perf_counter_ns
from typing import Any, cast

from pipegraph.bundle import Bundle, filled, named
from pipegraph.chunk import Chunk, Cursor, EndOfEpoch, Failure, Lineages
from pipegraph.contracts import History, Operator, Source, history_of
from pipegraph.engine.stage.bundle_size import LONG_NS
from pipegraph.engine.stage.failure_policy import Outcome, ends_run
from pipegraph.engine.stage.hand_over import hand_over
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Loop, Worker
from pipegraph.errors import GraphError, as_raised, note, shown
from pipegraph.global_generators import Draws
from pipegraph.planning.kind import Restart, StageKind
from pipegraph.planning.plan import Plan, StagePlan

SNAPSHOT_EVERY = 64
"""Items between two snapshots of an iterator."""


class SourceKind(StageKind):
    """See the module docstring."""

    parallel = True

    def stays(self, operator: Operator | Source) -> str | None:
        if operator.gives == "part":
            return f"{operator.name} only names what is to be read"
        return super().stays(operator)

    def fixed(self, operator: Operator | Source) -> str | None:
        return f"{operator.name} can only be read in sequence"

    def level(self, operator: Operator | Source, inputs: Sequence[str]) -> str:
        return str(operator.gives)

    def hands_over_rows(self, stage: StagePlan) -> bool:
        return stage.traits.blocks

    def elastic(self, stage: StagePlan) -> bool:
        source = cast(Source, stage.operator)
        return bool(source.resizable)

    def has_length(self, stage: StagePlan) -> bool:
        source = cast(Source, stage.operator)
        known = stage.traits.has_length
        return source.length(0, 0, 1) is not None if known is None else known()

    def steps(
        self,
        stage: StagePlan,
        inputs: Sequence[int | None],
        epoch: int,
        rank: int,
        world_size: int,
        seed: int | None,
        history: History,
    ) -> int | None:
        source = cast(Source, stage.operator)
        if seed is not None:
            stage.traits.deals_with(seed)
        if history:
            source = copy.copy(source)
            source.begin_run(epoch, history_of(history, stage.name))
        found: int | None = source.length(epoch, rank, world_size)
        return found

    def split(self, stage: StagePlan, cursor: Cursor) -> tuple[Restart, list[Cursor]]:
        return Restart(step=cursor), []

    def why_unknown(self, operator: Operator | Source) -> str | None:
        return None if cast(Source, operator).resizable else "it cannot resume at another world size"

    def bundle_sizes(
        self, stage: StagePlan, plan: Plan, reader: object, world_size: int
    ) -> tuple[int, int, int, int]:
        rows, size, batches = stage.bundle_rows, sys.maxsize, 1
        if stage.bundle is not None:
            batch = plan.stages[stage.bundle]
            size = batch.group_size(world_size) or size
            if rows > (batch.group_size() or size):
                batches = rows // size  # its rows are in memory: several batches per bundle
        return rows, 1, size, batches

    def loop(self, stage: StageRun, worker: Worker) -> Loop:
        return sequence_loop(stage, worker)


def _chunk_of(stage: StageRun, source: Any, items: Any, epoch: int, step: int, of_steps: bool) -> Chunk:
    """Consecutive items: ``(position, item)``, or items alone if positions follow from steps (``of_steps``)."""
    run, name = stage.run, stage.name
    if of_steps:
        positions = source.positions_of(range(step, step + len(items)), epoch, run.rank, run.world_size)
    else:
        pairs = items
        try:
            found, items = map(list, zip(*pairs, strict=True))
            positions = list(map(as_int, found))  # JSON has no NumPy numbers
        except (TypeError, ValueError):
            raise GraphError(
                f"stage {name!r}: iterate must yield (position, item), the position a whole number, got {shown(pairs)}"
            ) from None
    if stage.plan.bundle_rows > 1:
        return Bundle(items, Lineages(name, positions), epoch, step, named(items, None))
    return filled(Chunk(None, ((name, positions[0]),), epoch, step, step + 1), items[0])


class _Epoch:
    """The items of an epoch, from a step on, as they are read."""

    def __init__(self, stage: StageRun, source: Any, epoch: int) -> None:
        self._stage, self._source, self._epoch = stage, source, epoch
        self._items: Iterator[object] | None = None
        self.ended = self.of_steps = self.never_waits = False
        # Whether the iterator has snapshots; not known before it has begun.
        self.has_snapshots: bool | None = None if stage.plan.traits.resumable else False

    def read(self, rows: int, step: int) -> Outcome:
        """Up to ``rows`` items from a step on; fewer where one took long, or where they end."""
        made: list[object] = []
        try:
            if self._items is None:
                self._items = self._begun(step)
            if rows == 1 or self.never_waits:
                made.extend(islice(self._items, rows))
            else:
                last_ns = perf_counter_ns()
                for item in islice(self._items, rows):
                    made.append(item)
                    now_ns = perf_counter_ns()
                    if now_ns - last_ns > LONG_NS:
                        rows = len(made)
                        break
                    last_ns = now_ns
            self.ended = len(made) < rows
            if self.has_snapshots is None:
                self.has_snapshots = self._source.snapshot() is not None
        except BaseException as error:
            return made, error
        return made, None

    def _begun(self, step: int) -> Iterator[object]:
        stage, source, epoch, run = self._stage, self._source, self._epoch, self._stage.run
        traits = stage.plan.traits
        place = (run.rank, run.world_size)
        stage.snapshots.restore(source, epoch, run.first_epoch)
        items = None
        if traits.blocks and not stage.plan.remote:
            items = source.items(epoch, *place, step)
        self.of_steps = items is not None
        self.never_waits = self.of_steps and traits.in_memory
        if items is None:
            items = iter(source.iterate(epoch, *place, step))
        if not traits.seeds_itself:
            items = Draws(run.seed, stage.name).each(items, epoch, (stage.name,), step)
        return items


def sequence_loop(stage: StageRun, worker: Worker) -> Loop:
    """The worker loop of a source that must be read sequentially."""
    source: Any = worker.operator  # a proxy, if it is read elsewhere
    planned = cast(Source, stage.plan.operator)
    run, pace, sender, meter = stage.run, stage.pace, stage.sender, worker.meter
    epoch, step = run.first_epoch, stage.restart.step
    began = step
    snapshots = False
    while True:
        run.horizon.wait_for(epoch, planned.reads_ahead)
        items = _Epoch(stage, source, epoch)
        failure: Failure | None = None
        first = True
        while stage.stop_epoch < epoch and not items.ended and failure is None:
            rows = pace.rows(step - began)
            if snapshots:  # taken between two items
                rows = min(rows, SNAPSHOT_EVERY - step % SNAPSHOT_EVERY)
            busy = meter.busy_ns
            made, error = meter.timed(items.read, rows, step)
            snapshots = bool(items.has_snapshots)
            if error is not None:
                failure = failure_of(stage, error, epoch, step + len(made))
                error = None  # its traceback refers to what holds a user's generator open
            spent = meter.busy_ns - busy
            out = _chunk_of(stage, source, made, epoch, step, items.of_steps) if made else None
            step += len(made)
            if snapshots and not step % SNAPSHOT_EVERY and not items.ended and failure is None:
                failure = snapshot_of(stage, source.snapshot, epoch, step)
            nbytes = hand_over(stage, worker, 0, out)
            if made:
                if not first and not items.never_waits:
                    pace.waits.note(len(made), spent)
                pace.note(len(made), spent, nbytes)
                del made, out
                yield
            first = False
        if failure is not None:
            sender.send(0, failure, False)
            failure = None  # its traceback refers to this frame
        del items  # closes a generator, and what it holds open
        sender.token(0, EndOfEpoch(epoch))
        epoch, step, began = epoch + 1, 0, 0
        yield


def snapshot_of(stage: StageRun, take: Callable[[], object], epoch: int, step: int) -> Failure | None:
    """Keep a snapshot of the source's iterator before ``step``, if it has any; returns the failure, if it fails."""
    try:
        snapshot = take()
        if snapshot is not None:
            stage.snapshots.add(epoch, step, snapshot)
    except BaseException as error:
        return failure_of(stage, error, epoch, step)
    return None


def failure_of(stage: StageRun, error: BaseException, epoch: int, step: int) -> Failure:
    """The failure that ends the epoch where a source raised ``error``."""
    if ends_run(stage, error):
        try:
            raise error  # the run is over, or Ctrl-C came in the consumer's thread
        finally:
            del error  # its traceback refers to this frame, and to what holds a user's generator open
    error = as_raised(error, f"stage {stage.name!r}:")
    note(error, f"pipegraph: stage {stage.name!r}, item {step} of this rank, epoch {epoch}")
    return Failure(error, epoch)
