"""What a rank has consumed of each source, from the cursor of what it delivered. Pure.

Where every stage between source and loader hands on each item in the order in which it came (or, as ``Shuffle``
does, says which it has handed on), what is left of an epoch is a set of positions that any number of ranks can share.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from pipegraph.chunk import Cursor
from pipegraph.contracts import FanIn, FanOut, Operator, Regroup, Source
from pipegraph.planning.plan import Plan, StagePlan
from pipegraph.policies import Skip, final_policy

Taken = tuple[int, str]
"""Steps from the start, and which of those behind them, as ``pipegraph.order.left`` has it."""


class Unknown(Exception):
    """The cursor does not say what was consumed, because of the stage that is named."""


def consumed(plan: Plan, cursor: Cursor, seed: int, epoch: int) -> dict[str, Taken]:
    """By source.

    Raises:
        Unknown: a stage keeps that to itself, or the graph branches.
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
    """Up from a stage's output.

    Args:
        more: samples behind the cursor that were delivered too.
        holes: steps of the source behind the cursor that were delivered too, as in :data:`Taken`.
    """
    stage = plan.stages[name]
    operator = stage.operator
    if stands_alone(plan, stage) is not None:
        raise Unknown(name)
    if isinstance(operator, Source):
        found[name] = ((0 if cursor is None else int(cursor)) + more, holes)
        return
    above = stage.upstream[0].stage
    if isinstance(operator, FanIn):
        if more or holes:
            raise Unknown(name)
        inputs = copy.copy(operator).cursors(cursor, len(stage.upstream))
        for edge, each in zip(stage.upstream, inputs, strict=True):
            _walk(plan, edge.stage, each, 0, "", draw, found)
        return
    drops = isinstance(final_policy(stage.spec.on_error), Skip) or (
        operator.kind == "map" and not operator.one_to_one
    )
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
        raise Unknown(name)  # which of the items behind the cursor they were is not known
    _walk(plan, above, cursor, more, holes, draw, found)


def stands_alone(plan: Plan, stage: StagePlan) -> str | None:
    """Why what was consumed above a stage cannot be read from its cursors, if that is so."""
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
    """The history's entry for ranks that have consumed this, as short as it goes: JSON."""
    counts: dict[str, Any] = {}
    for source in taken[0]:
        each = [rank[source] for rank in taken]
        alike = len(set(each)) == 1 and not each[0][1]
        counts[source] = each[0][0] if alike else [list(one) if one[1] else one[0] for one in each]
    if len(counts) == 1 and all(isinstance(count, int) for count in counts.values()):
        return world_size, next(iter(counts.values()))
    return world_size, counts
