"""Fan-ins: several inputs, one output; the operator's state decides which input is read next.

A cursor is the operator's own. It holds the cursors of the inputs, and all that the state depends on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from pipegraph.bundle import DROPPED
from pipegraph.chunk import Chunk, Cursor, EndOfEpoch, Item
from pipegraph.contracts import FanIn, Operator, Source
from pipegraph.engine.stage.cursors import detached, freeze
from pipegraph.engine.stage.parallel import ByChunk
from pipegraph.engine.stage.restore import ways_in
from pipegraph.engine.stage.serial import RowIntake, Serial, serial
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Loop, Worker
from pipegraph.errors import GraphError, shown
from pipegraph.planning.kind import Reached, Restart, StageKind
from pipegraph.planning.plan import StagePlan


class FanInKind(StageKind):
    """See the module docstring."""

    hands_on = True
    reads_in_turn = True
    stateless = "a fan-in keeps its state in its cursor: return it from cursor(), and restore it in cursors()"

    def hands_over_rows(self, stage: StagePlan) -> bool:
        return not stage.unordered_above

    def level(self, operator: Operator | Source, inputs: Sequence[str]) -> str:
        batches = "batch" in inputs and operator.gives == "same"
        return "batch" if batches else super().level(operator, inputs)

    def chunks(self, operator: Operator | Source, inputs: Sequence[int], world_size: int) -> int | None:
        found: int | None = cast(FanIn, operator).merged_length(inputs)
        return found

    def split(self, stage: StagePlan, cursor: Cursor) -> tuple[Restart, list[Cursor]]:
        return Restart(cursor=cursor), input_cursors(stage, cursor)

    def reached(
        self, stage: StagePlan, at: Reached, draw: tuple[int, int], drops: bool
    ) -> Sequence[Reached] | None:
        if at.more or at.holes:
            return None
        if at.cursor is None:
            return [at] * len(stage.upstream)
        return [Reached(each) for each in input_cursors(stage, at.cursor)]

    def why_unknown(self, operator: Operator | Source) -> str | None:
        return None if operator.traits.separate else "it depends on what comes beside each item"

    def loop(self, stage: StageRun, worker: Worker) -> Loop:
        return serial(_FanningIn(stage, worker))


def input_cursors(stage: StagePlan, cursor: Cursor) -> list[Cursor]:
    """The cursors at which a fan-in's inputs restart for its output to continue at ``cursor``."""
    fresh, inputs = detached(cast(FanIn, stage.operator)), len(stage.upstream)
    fresh.begin(inputs, 0)
    return list(fresh.cursors(cursor, inputs))


class _FanningIn(Serial):
    """Takes the items of several inputs in the order that the operator's state decides."""

    def __init__(self, stage: StageRun, worker: Worker) -> None:
        super().__init__(stage, worker)
        self._inboxes = [RowIntake(channel, self.account, self.hand_on) for channel in stage.inboxes]
        plan = stage.run.plan
        self._ways = ways_in(plan, stage.plan)
        self._tracked = plan.stages[
            plan.output.stage
        ].unordered_above  # samples are identified by lineage and path
        self._trusted = stage.plan.traits.trusted
        self._do = ByChunk(stage, self.operator.process).do
        self._left: Sequence[int] = ()  # inputs of which the rest of the epoch before is still to be dropped
        self.get = self._pick

    def begin(self, epoch: int, cursor: Cursor) -> None:
        # Not earlier: an input may wait for an item that comes long after its epoch's end, or never.
        self._drop(self._left)
        inputs = len(self._inboxes)
        self._epoch, self._unended = epoch, set(range(inputs))
        self.operator.begin(inputs, epoch)
        self._positions: list[Cursor] = [None] * inputs
        if cursor is not None:
            self._positions = list(self.operator.cursors(cursor, inputs))
        self._last = self._cursor()

    def _cursor(self) -> Cursor:
        made = self.operator.cursor(self._positions)
        return made if self._trusted else freeze(made)

    def _pick(self) -> Item:
        while (index := self.operator.next_input()) is not None:
            if index not in self._unended:
                raise GraphError(
                    f"stage {self.stage.name!r}: next_input() must return the number of an input that has not ended "
                    f"(now one of {sorted(self._unended)}), or None for the end of the epoch, got {shown(index)}"
                )
            item: Item = self._inboxes[index].get()
            if isinstance(item, EndOfEpoch):
                self._unended.discard(index)
                self.operator.end_input(index)
                continue
            if isinstance(item, Chunk):
                self._positions[index] = item.after
                if self._tracked:
                    paths = item.paths or ((),) * len(item.lineages)
                    item.paths = tuple((*path, self._ways[index]) for path in paths)
            return item
        return EndOfEpoch(self._epoch)

    def take(self, item: Chunk) -> Iterable[None]:
        self.held.add(item)
        (out,) = self.stage.failures.do_all(self.worker, item, self._do)
        if out.__class__ is Chunk:
            after = self._cursor()
            out.before, out.after, self._last = self._last, after, after
        if out is not DROPPED:
            self.send(out)
        return ()

    def end(self, end: EndOfEpoch) -> Iterable[None]:
        stage, left = self.stage, sorted(self._unended)
        own = _own(stage, left)
        at_once = [
            index for index in left if any(each in own and _draws(each) for each in _sources(stage, index))
        ]
        for index in left:
            stage.discard_input(index, end.epoch)
            self._inboxes[index].drop()
        # A sampler's generator has to come to where the next epoch begins, which may be another run.
        self._drop(at_once)
        self._left = [index for index in left if index not in at_once]
        return ()

    def _drop(self, left: Iterable[int]) -> None:
        for index in left:
            while not isinstance(item := self._inboxes[index].get(), EndOfEpoch):
                self.account.release(item.buffers)


def _own(stage: StageRun, left: Sequence[int]) -> list[StageRun]:
    """The stages above some inputs, also behind other fan-ins, that nobody else reads."""
    channels = [stage.inboxes[index] for index in left]
    above = {stage.above[index] for index in left if index < len(stage.above)}
    found: list[StageRun] = []
    while above:
        more = [
            each
            for each in above
            if all(channel in channels for output in each.outboxes for channel in output)
        ]
        if not more:
            break
        found += more
        channels += [channel for each in more for channel in each.inboxes]
        above = (above | {higher for each in more for higher in each.above}) - set(found)
    return found


def _sources(stage: StageRun, index: int) -> Iterator[StageRun]:
    """The sources above an input."""
    if index < len(stage.above):
        above: StageRun = stage.above[index]
        if not above.above:
            yield above
        for each in range(len(above.above)):
            yield from _sources(above, each)


def _draws(source: StageRun) -> bool:
    """Whether a source draws its order from a sampler's generators."""
    operator: Any = source.plan.operator
    return source.plan.draws_resumably and operator.between() is not None
