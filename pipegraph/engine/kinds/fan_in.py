"""Fan-ins: several inputs, one output; the operator's state decides which input is read next.

A cursor is the operator's own. It holds the cursors of the inputs, and all that the state depends on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from pipegraph.bundle import DROPPED
from pipegraph.chunk import Chunk, Cursor, EndOfEpoch
from pipegraph.contracts import FanIn
from pipegraph.engine.memory import Account
from pipegraph.engine.stage.cursors import detached, freeze
from pipegraph.engine.stage.hand_over import hand_over
from pipegraph.engine.stage.parallel import ByChunk
from pipegraph.engine.stage.restore import ways_in
from pipegraph.engine.stage.row_intake import RowIntake
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Worker
from pipegraph.errors import GraphError, shown
from pipegraph.planning.kind import Reached, Restart, StageKind
from pipegraph.planning.plan import StagePlan

Loop = Iterator[None]


class FanInKind(StageKind):
    """See the module docstring."""

    hands_on = True
    reads_in_turn = True
    stateless = "a fan-in keeps its state in its cursor: return it from cursor(), and restore it in cursors()"

    def level(self, operator: Any, inputs: Sequence[str]) -> str:
        batches = "batch" in inputs and operator.gives == "same"
        return "batch" if batches else super().level(operator, inputs)

    def chunks(self, operator: Any, inputs: Sequence[int], world_size: int) -> int | None:
        found: int | None = operator.merged_length(inputs)
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

    def why_unknown(self, operator: Any) -> str | None:
        return None if operator.traits.separate else "it depends on what comes beside each item"

    def loop(self, stage: StageRun, worker: Worker) -> Loop:
        return merge_loop(stage, worker)


def input_cursors(stage: StagePlan, cursor: Cursor) -> list[Cursor]:
    """The cursors at which a fan-in's inputs restart for its output to continue at ``cursor``."""
    operator: Any = stage.operator
    fresh, inputs = detached(operator), len(stage.upstream)
    fresh.begin(inputs, 0)
    return list(fresh.cursors(cursor, inputs))


def merge_loop(stage: StageRun, worker: Worker) -> Loop:
    """Read several inputs in the order that the operator's state decides."""
    operator: FanIn = worker.operator
    trusted = stage.plan.traits.trusted
    account, put = stage.run.account, partial(stage.sender.send, 0)
    inboxes = [RowIntake(channel, account) for channel in stage.inboxes]
    count = len(inboxes)
    plan = stage.run.plan
    tracked = plan.stages[plan.output.stage].unordered_above  # samples are identified by lineage and path
    ways = ways_in(plan, stage.plan)
    epoch = stage.run.first_epoch
    do = ByChunk(stage, operator.process).do

    def cursor_at(positions: list[Any]) -> Any:
        return operator.cursor(positions) if trusted else freeze(operator.cursor(positions))

    while True:
        operator.begin(count, epoch)
        positions: list[Any] = [None] * count
        resumed = epoch == stage.run.first_epoch and stage.restart.cursor is not None
        if resumed:
            positions = list(operator.cursors(stage.restart.cursor, count))
        last = cursor_at(positions)
        unended = set(range(count))
        held: list[Any] = []
        index = operator.next_input()
        while index is not None:
            if index not in unended:
                raise _no_input(stage.name, index, unended)
            item, out = inboxes[index].get(), None
            if item.__class__ is Chunk:
                if tracked:
                    item.paths = tuple(
                        (*path, ways[index]) for path in item.paths or ((),) * len(item.lineages)
                    )
                positions[index] = item.after
                if item.buffers:
                    held.append(item.buffers)
                (out,) = stage.failures.done(worker, item, do)
                if out is DROPPED:
                    out = None
                elif out.__class__ is Chunk:
                    after = cursor_at(positions)
                    out.before, out.after, last = last, after, after
            elif isinstance(item, EndOfEpoch):
                unended.discard(index)
                operator.end_input(index)
            else:
                put(item)
            index = operator.next_input()
            if out is not None:
                hand_over(stage, worker, 0, out, tuple(chain.from_iterable(held)))
                held.clear()
            out = None  # a failure's traceback may come to refer to the loader
            yield
        for buffers in held:
            account.release(buffers)
        left = sorted(unended)
        own = _own(stage, left)
        at_once = [
            index for index in left if any(each in own and _draws(each) for each in _sources(stage, index))
        ]
        for index in left:
            stage.discard_input(index, epoch)
            inboxes[index].drop()
        # A sampler's generator has to come to where the next epoch begins, which may be another run.
        _to_the_end(inboxes, at_once, account)
        left = [index for index in left if index not in at_once]
        put(EndOfEpoch(epoch))
        epoch += 1
        yield
        # Not earlier: an input may wait for an item that comes long after this epoch's end, or never.
        _to_the_end(inboxes, left, account)


def _no_input(stage: str, index: Any, unended: Iterable[int]) -> GraphError:
    """The error for a fan-in that would wait for what never comes."""
    return GraphError(
        f"stage {stage!r}: next_input() must return the number of an input that has not ended (now one of "
        f"{sorted(unended)}), or None for the end of the epoch, got {shown(index)}"
    )


def _to_the_end(inboxes: Sequence[RowIntake], left: Iterable[int], account: Account) -> None:
    for index in left:
        while not isinstance(item := inboxes[index].get(), EndOfEpoch):
            account.release(item.buffers)


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
