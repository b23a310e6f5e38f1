"""Expanding stages: one chunk in, any number out.

A child's cursor is ``(parent.before, children done)``; below a completion-order stage, where nothing marks the last
child, it is its parent's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from time import perf_counter_ns
from typing import cast

from pipegraph.bundle import DROPPED, Bundle
from pipegraph.chunk import Chunk, Cursor, Failure
from pipegraph.contracts import Operator, Source
from pipegraph.engine.remote.worker import Expanded
from pipegraph.engine.stage.bundle_size import BUNDLE_NS
from pipegraph.engine.stage.cursors import compare
from pipegraph.engine.stage.failure_notes import not_a_chunk
from pipegraph.engine.stage.failure_policy import Outcome
from pipegraph.engine.stage.hand_over import hand_over
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import HALFWAY, Loop, Worker
from pipegraph.planning.kind import Reached, Restart, StageKind
from pipegraph.planning.plan import StagePlan

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

    def why_unknown(self, operator: Operator | Source) -> str | None:
        return None if cast(Operator, operator).elastic else "it makes several items of one"

    def loop(self, stage: StageRun, worker: Worker) -> Loop:
        return expand_loop(stage, worker)


class _Family:
    """The children of a chunk, as a block whose count is known once the last one is made.

    Args:
        begin: makes the children from one on.
    """

    def __init__(
        self,
        stage: StageRun,
        worker: Worker,
        parent: Chunk,
        row: int,
        begin: Callable[[Chunk, int], Iterator[object]],
    ) -> None:
        self.parent = parent
        self._worker, self._row = worker, row
        self.count: float = math.inf
        self._begin = begin
        self._stage = stage
        self._children: Iterator[object] | None = None

    def one(self, index: int) -> Chunk:
        return self.parent

    def answer(self, error: BaseException, at: int) -> Failure | None:
        return self._stage.failures.handle(self._worker, self.parent, error, self._row)

    def do(self, block: object, at: int) -> Outcome:
        """Make the next children: one at a time where they may be waited for."""
        made: list[object] = []
        try:
            if self._children is None:
                self._children, self.count = self._begin(self.parent, at), math.inf
            began_ns = last_ns = perf_counter_ns()
            most = CHILDREN if self._stage.pace.waits.alone is False else 1
            for child in islice(self._children, most):
                if not isinstance(child, Chunk):
                    raise not_a_chunk(child, self._stage.name, "each item of process")
                made.append(child)
                now_ns = perf_counter_ns()
                if at or len(made) > 1:  # up to the first child the function did its own work
                    self._stage.pace.waits.note(1, now_ns - last_ns)
                if now_ns - began_ns > BUNDLE_NS:
                    return made, None
                last_ns = now_ns
        except BaseException as error:
            self._children, self.count = None, at + len(made) + 1
            return made, error
        if len(made) < most:
            self.count = at + len(made)
        return made, None


def expand_loop(stage: StageRun, worker: Worker) -> Loop:
    """See the module docstring."""
    inbox, pace, failures, meter = stage.inboxes[0], stage.pace, stage.failures, worker.meter
    together, nested = min(CHILDREN, stage.plan.bundle_rows), not stage.plan.unordered_above
    operator, copies = worker.operator, stage.plan.spec.retry.times > 0
    process = failures.seeded(operator.process) if not stage.plan.remote else None
    # A deadline is one chunk's.
    at_once = process is None and together > 1 and stage.plan.spec.timeout is None

    def begin(begun: list[object], parent: Chunk, start: int) -> Iterator[object]:
        if process is None:
            return iter(operator.children(parent, start, begun.pop() if begun else None))
        return islice(process(parent.copied() if copies else parent), start, None)

    while True:
        ticket, item = inbox.take(pace.rows())
        worker.ticket = ticket
        if not isinstance(item, Chunk):
            stage.sender.token(ticket, item)
            yield
            continue
        # Hold the parents until the end: a child may be a view of one, and ``process`` may still read it.
        held, epoch, count, row = item.buffers, item.epoch, item.count, 0
        parents = item if at_once and isinstance(item, Bundle) else None
        busy = since = meter.busy_ns
        waiting: list[Chunk] = []
        while row < count and stage.stop_epoch < epoch:
            begun: list[object] = []
            if parents and row < count - 1 and not _children_to_drop(stage, epoch, parents.place(row)[0]):
                found = meter.timed(operator.expand_all, parents.part(row, count) if row else parents)
                if found is None:
                    parents = None  # each of the rest by itself
                else:
                    yield from _leave(stage, worker, ticket, waiting)
                    hand_over(stage, worker, ticket, _together(found, parents, row, nested), last=False)
                    begun, since, done = list(found[-1:]), meter.busy_ns, len(found[0])
                    meter.calls += done
                    row += done
                    if found[-1] is None:
                        continue
            parent = item.one(row)
            before, index, skip = parent.before, 0, _children_to_drop(stage, epoch, parent.before)
            family = _Family(stage, worker, parent, row, partial(begin, begun))
            for made in failures.with_policy(worker, family, family.do, family.answer):
                for child in made:
                    single = together == 1 or not isinstance(child, Chunk) or not Bundle.takes(child)
                    if isinstance(child, Chunk):
                        index += 1
                        if index <= skip:
                            continue
                        child.before, child.after = (
                            ((before, index - 1), (before, index)) if nested else (before, before)
                        )
                        child.epoch = epoch
                    if not single:
                        waiting.append(child)
                        if len(waiting) < together:
                            continue
                    yield from _leave(stage, worker, ticket, waiting)
                    since = meter.busy_ns
                    if single and child is not DROPPED:
                        hand_over(stage, worker, ticket, child, last=False)
                        yield HALFWAY
                if meter.busy_ns - since > BUNDLE_NS or pace.waits.alone is not False:
                    yield from _leave(stage, worker, ticket, waiting)
                    since = meter.busy_ns
                if stage.stop_epoch >= epoch:
                    break
            meter.calls += 1
            row += 1
        del item, parents
        made, child = (), None  # a failure's traceback may come to refer to the loader
        hand_over(stage, worker, ticket, Bundle.of(waiting) if waiting else None, held)
        pace.note(max(1, row), meter.busy_ns - busy, 0)
        yield


def _leave(stage: StageRun, worker: Worker, ticket: int, waiting: list[Chunk]) -> Iterator[object]:
    """Hand over the children that wait, and yield: who drives an inline stage makes the room for them."""
    if waiting:
        hand_over(stage, worker, ticket, Bundle.of(waiting), last=False)
        waiting.clear()
        yield HALFWAY


def _together(found: Expanded, parents: Bundle, row: int, nested: bool) -> Bundle | None:
    """The children that were made in one call, of the parents from ``row`` on."""
    counts, children, rows, names, _ = found
    if not rows:
        return None
    places: list[tuple[Cursor, Cursor]] = []
    for before, count in zip(parents.steps()[row:], counts, strict=False):
        places += [((before, at), (before, at + 1)) if nested else (before, before) for at in range(count)]
    made = Bundle(children, rows, parents.epoch, places[0][0], names, places)
    if children.__class__ is not list:
        made.take_packed(children)
    return made


def _children_to_drop(stage: StageRun, epoch: int, before: Cursor) -> int:
    """How many children of the chunk with this cursor a resumed run has had: its first one's."""
    at = stage.restart.cursor
    if at is not None and epoch == stage.run.first_epoch and not compare(before, at[0]):
        return int(at[1])
    return 0
