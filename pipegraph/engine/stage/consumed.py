"""Computes what a rank has consumed of each source, from the cursor of its last delivery. Pure.

If every stage between source and loader passes items on in order (or, like ``Shuffle``, can tell which it has passed
on), then what is left of an epoch is a set of positions that can be dealt to any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipegraph.chunk import Cursor
from pipegraph.order.left import Taken
from pipegraph.planning.kind import Reached
from pipegraph.planning.plan import Plan, StagePlan


class Unknown(Exception):
    """The cursor does not tell what was consumed, because of the stage named in the message."""


def consumed(plan: Plan, cursor: Cursor, seed: int, epoch: int) -> dict[str, Taken]:
    """What was consumed, by source.

    Raises:
        Unknown: a stage's cursors do not tell, or the graph branches.
    """
    found: dict[str, Taken] = {}
    waiting = [(plan.output.stage, Reached(cursor))]
    while waiting:
        name, at = waiting.pop()
        stage = plan.stages[name]
        if why_unknown(plan, stage) is not None:
            raise Unknown(name)
        if not stage.upstream:
            found[name] = ((0 if at.cursor is None else int(at.cursor)) + at.more, at.holes)
            continue
        inputs = stage.kind.reached(stage, at, (seed, epoch), stage.spec.outcome.drops)
        if inputs is None:
            raise Unknown(name)
        waiting += zip([edge.stage for edge in stage.upstream], inputs, strict=True)
    return found


def why_unknown(plan: Plan, stage: StagePlan) -> str | None:
    """The reason why a stage's cursors do not tell what was consumed above it; None if they do."""
    readers = len(plan.consumers(stage.name)) + (plan.output.stage == stage.name)
    if readers > 1:
        return "it feeds several stages"
    if stage.unordered_above:
        return "it runs, or one above it, with ordered=False"
    return stage.kind.why_unknown(stage.operator)


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
