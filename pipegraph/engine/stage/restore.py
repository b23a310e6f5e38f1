"""Computes from the cursor of the last delivery every stage's restart point, and what a rank has consumed. Pure.

A cursor mirrors the graph above its edge; each kind says how it splits into those of its inputs. A stage that feeds
several others restarts at the lowest cursor that one of them needs; edges that are further along drop what they had.

Below a completion-order stage chunks have no fixed places: there the restart is at the watermark,
and delivered samples are identified by lineage and path.

If every stage between source and loader passes items on in order (or, like ``Shuffle``, can tell which it has passed
on), then what is left of an epoch is a set of positions that can be dealt to any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice

from pipegraph.batches import select_rows
from pipegraph.chunk import Chunk, Cursor, Lineage
from pipegraph.contracts import History
from pipegraph.engine.stage.cursors import earlier
from pipegraph.order.left import Taken
from pipegraph.planning.kind import Reached, Restart
from pipegraph.planning.plan import Plan, StagePlan

Path = tuple[int, ...]
EdgeKey = tuple[str, int]
"""``(consuming stage, input index)``; the loader's own edge is ``("", 0)``."""


@dataclass(frozen=True, eq=False, repr=False)
class Resume:
    """A position inside an epoch: where a run starts, or what is left of a rank's part.

    Attributes:
        cursor: after the last delivery; None: nothing was delivered.
        delivered: samples delivered beyond it, by the path on which they came.
        history: what was consumed before, at other world sizes.
        stream: (rank, world size) whose part of the epoch it is; None: this rank's own.
        iterators: by source, the ``(step, state)`` of its iterator from which a restart continues.
        begun: by source, the step at which all begins anew, where the graph was changed inside the epoch.
    """

    cursor: Cursor = None
    delivered: Mapping[Path, Set[Lineage]] = field(default_factory=dict)
    history: History = ()
    stream: tuple[int, int] | None = None
    iterators: Mapping[str, tuple[int, object]] = field(default_factory=dict)
    begun: Mapping[str, int] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class RestartPoints:
    """The restart points with which to resume from a cursor.

    Attributes:
        stages: by stage, its restart.
        skips: by edge, the cursor before which all chunks were delivered.
        inputs: by stage with one input, the cursor at which the input restarts.
        steps: by source, the step at which it restarts.
    """

    stages: dict[str, Restart] = field(default_factory=dict)
    skips: dict[EdgeKey, Cursor] = field(default_factory=dict)
    inputs: dict[str, Cursor] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)


def restart_points(plan: Plan, cursor: Cursor, begun: Mapping[str, int]) -> RestartPoints:
    """How every running stage must restart so that the output continues after ``cursor``.

    Args:
        begun: by source, the step at which it begins where nothing was delivered (0 for others).
    """
    found = RestartPoints()
    asked: dict[str, dict[EdgeKey, list[Cursor]]] = {stage.name: {} for stage in plan.running}
    asked[plan.output.stage]["", 0] = [cursor]
    for stage in reversed(plan.running):
        wanted = asked[stage.name]
        cursors = _different(each for of_edge in wanted.values() for each in of_edge)
        lowest = _lowest(cursors)
        if not stage.unordered_above:
            for edge, of_edge in wanted.items():
                each = _lowest(of_edge)
                if earlier(lowest, each):
                    found.skips[edge] = each
        restart, inputs = Restart(), [None] * len(stage.upstream)
        if lowest is not None:
            restart, inputs = stage.kind.split(stage, lowest)
        asking = [inputs]
        if stage.unordered_above and lowest is not None:
            # These may be of different orders of completion: none has all inputs at the lowest that one needs.
            asking += [stage.kind.split(stage, each)[1] for each in cursors if each is not lowest]
        found.stages[stage.name] = restart
        if not stage.upstream:
            if lowest is None:
                restart.step = begun.get(stage.name, 0)
            found.steps[stage.name] = restart.step
        for index, edge_up in enumerate(stage.upstream):
            each = [of_inputs[index] for of_inputs in asking]
            asked[edge_up.stage][stage.name, index] = _different(each)
            found.inputs[stage.name] = _lowest(each)
    return found


def _lowest(cursors: Sequence[Cursor]) -> Cursor:
    found = cursors[0] if cursors else None
    for each in cursors[1:]:
        if earlier(each, found):
            found = each
    return found


def _different(cursors: Iterable[Cursor]) -> list[Cursor]:
    found: list[Cursor] = []
    for each in cursors:
        if each not in found:
            found.append(each)
    return found


# -- what was consumed, for another number of ranks -------------------------------------------------


class Unknown(Exception):
    """The cursor does not tell what was consumed, because of the stage named in the message."""


def consumed(plan: Plan, cursor: Cursor, seed: int, epoch: int, begun: Mapping[str, int]) -> dict[str, Taken]:
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
            found[name] = ((begun.get(name, 0) if at.cursor is None else int(at.cursor)) + at.more, at.holes)
            continue
        inputs = stage.kind.reached(stage, at, (seed, epoch), stage.spec.skip is not None)
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


def history_entry(world_size: int, taken: Sequence[Mapping[str, Taken]]) -> tuple[int, object]:
    """The history entry, as JSON, for what each rank has consumed, in the shortest form."""
    counts: dict[str, object] = {}
    for source in taken[0]:
        each = [rank[source] for rank in taken]
        alike = len(set(each)) == 1 and not each[0][1]
        counts[source] = each[0][0] if alike else [list(one) if one[1] else one[0] for one in each]
    if len(counts) == 1 and all(isinstance(count, int) for count in counts.values()):
        return world_size, next(iter(counts.values()))
    return world_size, counts


# -- samples below completion-order stages ----------------------------------------------------------


def unique_paths(plan: Plan) -> dict[EdgeKey, Path]:
    """For each edge with a single path to the output: the numbers of the fan-in inputs on it (see ``ways_in``).

    Looks for at most two paths per stage, which is enough to know that there is more than one: with n fan-outs that
    meet again there may be 2^n.
    """
    ways: dict[str, set[Path]] = {stage.name: set() for stage in plan.running}
    ways[plan.output.stage].add(())
    found: dict[EdgeKey, Path] = {("", 0): ()}
    for stage in reversed(plan.running):
        merged = ways_in(plan, stage) if stage.kind.reads_in_turn else None
        for index, edge in enumerate(stage.upstream):
            onward = {way if merged is None else (merged[index], *way) for way in ways[stage.name]}
            ways[edge.stage] = set(islice(ways[edge.stage] | onward, 2))
            if len(onward) == 1:
                found[stage.name, index] = next(iter(onward))
    return found


def ways_in(plan: Plan, stage: StagePlan) -> tuple[int, ...]:
    """The number of each input of a fan-in; inputs share a number if a sample comes through one of them, never both.

    These are the outputs of one ``Route``. Which output a batch takes may depend on the samples in it, and these may
    differ after a restart: a sample counts as delivered whichever output it took.
    """
    routes: list[dict[str, int]] = []
    for edge in stage.upstream:
        outputs: dict[str, int] = {}
        while True:
            above = plan.stages[edge.stage]
            if above.kind.sends_in_turn:
                outputs[above.name] = edge.output
            if len(above.upstream) != 1:
                break
            edge = above.upstream[0]
        routes.append(outputs)

    def apart(one: int, other: int) -> bool:
        return any(routes[other].get(name, output) != output for name, output in routes[one].items())

    numbers: list[int] = []
    for index in range(len(routes)):
        same = (
            first
            for first in dict.fromkeys(numbers)
            if all(apart(index, each) for each, number in enumerate(numbers) if number == first)
        )
        numbers.append(next(same, index))
    return tuple(numbers)


def was_delivered(
    delivered: Mapping[Path, Set[Lineage]], path: Path, shorten: bool = False
) -> Callable[[object], bool]:
    """A filter for the edge whose path to the output is ``path``: whether all samples of a chunk were delivered.

    After a restart samples are batched differently. Where batches fan out, one branch may have delivered a part of
    a batch that the other still needs: with ``shorten`` the filter removes that part from the batch.
    """

    def seen(item: object) -> bool:
        if not isinstance(item, Chunk) or not item.lineages:
            return False
        paths = item.paths or ((),) * len(item.lineages)
        count = len(item.row_lineages)
        left = [
            row not in delivered.get((*way, *path), ()) for row, way in zip(item.lineages, paths, strict=True)
        ]
        kept = [row for row in range(count) if any(left[sample] for sample in item.samples_of(row))]
        if kept and shorten and item.batched and len(kept) < count:
            item.shorten(kept, select_rows(item.data, kept, count, item.layout))
        return not kept

    return seen


def expands_below(plan: Plan, edge: EdgeKey) -> bool:
    """Whether batches on an edge with a single path to the output are split further down."""
    name = edge[0]
    while name:
        if plan.stages[name].kind.expands:
            return True
        below = plan.consumers(name)
        name = below[0][0] if below else ""
    return False
