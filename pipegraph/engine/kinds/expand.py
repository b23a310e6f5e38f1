"""Expanding stages: one chunk in, any number out.

A child's cursor is ``(parent.before, children done)``; below a completion-order stage, where nothing marks the last
child, it is its parent's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter_ns
from typing import Any

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, Cursor
from pipegraph.engine.stage.bundle_size import BUNDLE_NS
from pipegraph.engine.stage.cursors import same
from pipegraph.engine.stage.failure_notes import not_a_chunk
from pipegraph.engine.stage.row_intake import rows_of
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage.unit import Unit
from pipegraph.engine.stage_worker import Worker
from pipegraph.errors import GraphError
from pipegraph.parameters import chunks_of
from pipegraph.planning.kind import Reached, Restart, StageKind
from pipegraph.planning.plan import StagePlan

Loop = Iterator[Any]

HALFWAY = True
"""Yielded by a loop in the middle of a unit of work, where its worker cannot leave."""

CHILDREN = 64
"""Maximum number of children sent together, and fewer if they take longer than ``BUNDLE_NS``."""


class ExpandKind(StageKind):
    """See the module docstring."""

    parallel = True
    expands = True

    def hands_over_rows(self, stage: StagePlan) -> bool:
        return True

    def split(self, stage: StagePlan, cursor: Cursor) -> tuple[Restart, list[Cursor]]:
        if stage.unordered_above:
            return Restart(), [cursor]
        return Restart(cursor=cursor), [cursor[0]]

    def reached(
        self, stage: StagePlan, at: Reached, draw: tuple[int, int], drops: bool
    ) -> Sequence[Reached] | None:
        if at.cursor is not None:
            if drops and at.cursor[1]:
                return None
            at = Reached(at.cursor[0], at.more + at.cursor[1], at.holes)
        return super().reached(stage, at, draw, drops)

    def why_unknown(self, operator: Any) -> str | None:
        return None if operator.elastic else "it makes several items of one"

    def loop(self, stage: StageRun, worker: Worker) -> Loop:
        return expand_loop(stage, worker)


class _Children(Unit):
    """The children of the item that a worker has taken."""

    def part(self, start: int, stop: int) -> Chunk | None:
        children = self.made[start:stop]
        return Bundle.of(children) if self.rows > 1 else children[0]


def expand_loop(stage: StageRun, worker: Worker) -> Loop:
    """See the module docstring."""
    take, sender, account = stage.inboxes[0].take, stage.sender, stage.run.account
    rows, pace = stage.pace.rows, stage.pace
    nested = not stage.plan.unordered_above
    unit = _Children(stage, worker)
    process = stage.failures.guard_children(worker, worker.operator.process)
    while True:
        ticket, item = take(rows())
        worker.ticket = ticket
        if not isinstance(item, Chunk):
            sender.token(ticket, item)
            yield
            continue
        parents = rows_of(item, account) if item.__class__ is Bundle else [item]
        held = tuple([each for parent in parents for each in parent.buffers])
        unit.begin(ticket, held)
        busy = worker.meter.busy_ns
        for index, parent in enumerate(parents):
            yield from _expand(stage, worker, unit, process, parent, index, nested)
        del parents, item
        unit.send(last=True)
        pace.note(index + 1, worker.meter.busy_ns - busy, 0)
        yield


def _identity(child: Chunk) -> str:
    source, *places = child.lineages[0]
    return f"{source!r} {', '.join(map(str, places))}"


def _expand(
    stage: StageRun, worker: Worker, unit: _Children, process: Any, parent: Chunk, row: int, nested: bool
) -> Loop:
    """Send the children of one chunk, except those that left before a restart."""
    skip = _children_to_drop(stage, parent)
    before, epoch, meter, together = parent.before, parent.epoch, worker.meter, unit.rows > 1
    pace = stage.pace
    children: Any = None
    last: Any = None
    index = spent = 0
    while stage.stop_epoch < epoch:
        # Hold the parent until the end: a child may be a view of it, and ``process`` may still read it.
        meter.began_ns = perf_counter_ns()
        child: Any
        try:
            if children is None:
                children = chunks_of(process(parent))
            child = next(children, None)
            if child is not None and not isinstance(child, Chunk):
                raise not_a_chunk(child, stage.name, "each item of process")
            if child is not None and len(parent.lineages) == 1:
                if child.lineages == last:
                    raise GraphError(
                        f"stage {stage.name!r}: process made two items of one identity, {_identity(child)}, which "
                        "would draw the same random numbers, and of which a resume could drop one: make each with "
                        "chunk.child(index, data), with an index of its own"
                    )
                last = child.lineages
            # The cursor that the child before it was given: it is the same chunk.
            if child is not None and index and child.after == (before, index):
                raise GraphError(
                    f"stage {stage.name!r}: process gave one chunk twice, which a resume cannot tell apart: make each "
                    "item with chunk.child(index, data) or chunk.row(index, data)"
                )
        except BaseException as error:
            child = stage.failures.handle(worker, parent, error, row, index)
            children = iter(())
        took = perf_counter_ns() - meter.began_ns
        meter.worked(took)
        spent += took
        if index:  # up to the first child the function did its own work
            pace.waited(took)
        if child is None:
            break
        index += 1
        if not isinstance(child, Chunk):
            unit.send()
            unit.sender.send(unit.ticket, child, False)
            yield HALFWAY
            continue
        if index <= skip:
            continue
        child.before, child.after = ((before, index - 1), (before, index)) if nested else (before, before)
        child.epoch = epoch
        if not together or not Bundle.takes(child):
            _send_alone(unit, child)
            yield HALFWAY  # the thread that drives an inline stage may be the one that has to make room
            continue
        unit.made.append(child)
        if pace.alone is not False or spent > BUNDLE_NS or len(unit.made) >= CHILDREN:
            unit.send()
            unit.made.clear()
            unit.sent = spent = 0
    meter.calls += 1


def _send_alone(unit: _Children, child: Chunk) -> None:
    unit.send()
    rows, unit.rows = unit.rows, 1
    unit.made.append(child)
    unit.send()
    unit.rows = rows


def _children_to_drop(stage: StageRun, parent: Chunk) -> int:
    at = stage.restart.cursor
    if at is not None and parent.epoch == stage.run.first_epoch and same(parent.before, at[0]):
        return int(at[1])
    return 0
