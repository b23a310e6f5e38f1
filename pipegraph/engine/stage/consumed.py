"""Computes what a rank has consumed of each source, from the cursor of its last delivery. Pure.

If every stage between source and loader passes items on in order (or, like ``Shuffle``, can tell which it has passed
on), then what is left of an epoch is a set of positions that can be dealt to any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipegraph.chunk import Cursor
from pipegraph.contracts import FanIn, FanOut, Operator, Regroup, Source
from pipegraph.engine.stage.cursors import input_cursors
from pipegraph.planning.plan import Plan, StagePlan

Taken = tuple[int, str]
"""Steps consumed from the start, and further ones out of order, in the format of ``pipegraph.order.left``."""


class Unknown(Exception):
    """The cursor does not tell what was consumed, because of the stage named in the message."""


def consumed(plan: Plan, cursor: Cursor, seed: int, epoch: int) -> dict[str, Taken]:
    """What was consumed, by source.

    Raises:
        Unknown: a stage's cursors do not tell, or the graph branches.
    """
    found: dict[str, Taken] = {}
    _walk(plan, plan.output.stage, cursor, 0, "", (seed, epoch), found)
    return found


def _walk(
    plan: Plan,
    name: str,
    cursor: Cursor,
    more: int,
    holes: str,
    draw: tuple[int, int],
    found: dict[str, Taken],
) -> None:
    """Walk upstream from a stage's output.

    Args:
        more: number of samples after the cursor that were delivered too.
        holes: steps of the source after the cursor that were delivered too, as in :data:`Taken`.
    """
    stage = plan.stages[name]
    operator = stage.operator
    if why_unknown(plan, stage) is not None:
        raise Unknown(name)
    if isinstance(operator, Source):
        found[name] = ((0 if cursor is None else int(cursor)) + more, holes)
        return
    above = stage.upstream[0].stage
    if isinstance(operator, FanIn):
        if more or holes:
            raise Unknown(name)
        inputs = input_cursors(operator, cursor, len(stage.upstream))
        for edge, each in zip(stage.upstream, inputs, strict=True):
            _walk(plan, edge.stage, each, 0, "", draw, found)
        return
    drops = stage.spec.outcome.drops or (operator.kind == "map" and not operator.one_to_one)
    if operator.kind == "expand":
        if cursor is not None:
            if drops and cursor[1]:
                raise Unknown(name)
            cursor, more = cursor[0], more + cursor[1]
    elif isinstance(operator, Regroup):
        passed = operator.handed_on(cursor, more, (*draw, name))
        if passed is None or (passed[1] and holes):
            raise Unknown(name)
        cursor, more, holes = passed[0], passed[2], passed[1] or holes
    if drops and more:
        raise Unknown(name)  # it is not known which items after the cursor they were
    _walk(plan, above, cursor, more, holes, draw, found)


def why_unknown(plan: Plan, stage: StagePlan) -> str | None:
    """The reason why a stage's cursors do not tell what was consumed above it; None if they do."""
    operator = stage.operator
    readers = len(plan.consumers(stage.name)) + (plan.output.stage == stage.name)
    if readers > 1:
        return "it feeds several stages"
    if stage.unordered_above:
        return "it runs, or one above it, with ordered=False"
    if isinstance(operator, Source):
        return None if operator.resizable else "it cannot resume at another world size"
    if operator.stateful:
        return "it keeps a state"
    if isinstance(operator, FanOut) or (isinstance(operator, FanIn) and not operator.separate):
        return "it depends on what comes beside each item"
    if operator.kind == "expand" and not operator.elastic:
        return "it makes several items of one"
    if isinstance(operator, Regroup) and type(operator).handed_on is Regroup.handed_on:
        own = type(operator).resume is not Operator.resume
        return "it holds items of its own choice" if own else None
    return None


def entry(world_size: int, taken: Sequence[Mapping[str, Taken]]) -> tuple[int, Any]:
    """The history entry, as JSON, for what each rank has consumed, in the shortest form."""
    counts: dict[str, Any] = {}
    for source in taken[0]:
        each = [rank[source] for rank in taken]
        alike = len(set(each)) == 1 and not each[0][1]
        counts[source] = each[0][0] if alike else [list(one) if one[1] else one[0] for one in each]
    if len(counts) == 1 and all(isinstance(count, int) for count in counts.values()):
        return world_size, next(iter(counts.values()))
    return world_size, counts
