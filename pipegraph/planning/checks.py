"""Checks of a stage in its graph: its options, its policy, its input, and caches. Pure.

Each raises a GraphError that names the stage, the rule and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from pipegraph.contracts import DEPENDENCES, STATE_METHODS, FanIn, Operator, Source
from pipegraph.errors import GraphError
from pipegraph.planning.kind import StageKind
from pipegraph.planning.plan import Plan, StagePlan, lineage_above
from pipegraph.stage_spec import Edge, StageSpec


def check_state(spec: StageSpec, operator: Operator, kind: StageKind) -> None:
    """What an operator declares about its state agrees with its methods and its kind."""
    has = [name for name in STATE_METHODS if callable(getattr(operator, name, None))]
    name = type(operator).__name__
    said = type(operator).stateful is not Operator.stateful
    if len(has) == 2 and not operator.stateful and not said:
        raise GraphError(
            f"stage {spec.name!r}: {name} has state_dict() and load_state_dict() from a class that is not an operator. "
            "If the stage must resume from them, set stateful = True in the class (it then runs in order, with one "
            "worker); else set stateful = False"
        )
    if not operator.stateful:
        return
    if kind.stateless:
        raise GraphError(
            f"stage {spec.name!r}: {name} has state_dict() and load_state_dict(), but {kind.stateless}. If they are "
            "for something else, set stateful = False in the class"
        )
    if len(has) < 2:
        raise GraphError(
            f"stage {spec.name!r}: {name} has stateful = True, so it needs both state_dict() and load_state_dict(state)"
        )


def check_iterators(planned: Mapping[str, StagePlan]) -> None:
    """An iterator is read by one source: of two, each would get a part of its items, and which is left to chance."""
    read: dict[int, str] = {}
    for stage in planned.values():
        items = stage.traits.reads_once
        if items is None:
            continue
        if (other := read.setdefault(id(items), stage.name)) != stage.name:
            raise GraphError(
                f"stages {other!r} and {stage.name!r} read one {type(items).__name__}, so each would get a part of its "
                "items: let both follow one FromIterable, or give each a list or a callable that returns a new iterator"
            )


def check_policy(spec: StageSpec, operator: Operator | Source, kind: StageKind) -> None:
    """A policy needs one input, and a stage that can try an item again."""
    if kind.reads_in_turn:
        several = cast(FanIn, operator).inputs == "many"
        raise GraphError(
            f"stage {spec.name!r}: on_error={spec.on_error!r} is for stages with one input; {operator.name} "
            f"{'has several' if several else 'does no work on it that could fail'}"
        )
    if spec.retry.times and kind.keeps:
        raise GraphError(
            f"stage {spec.name!r}: Retry() tries one item again, but {operator.name} holds "
            "earlier items; put the work that may fail into a separate stage"
        )


def check_source(spec: StageSpec, source: Source) -> None:
    """A source has the methods by which its items are read."""
    kind, name = type(source), type(source).__name__
    lacks = [
        f"{method}({', '.join(arguments)})"
        for method, arguments in {
            "positions": ("epoch", "rank", "world_size", "start"),
            "read": ("position", "epoch"),
        }.items()
        if getattr(kind, method) is getattr(Source, method)
    ]
    if lacks and source.random_access:
        raise GraphError(
            f"stage {spec.name!r}: {name} has random_access = True, so it needs positions and read, but lacks "
            f"{' and '.join(lacks)}: define it"
        )
    if lacks and kind.iterate is Source.iterate:
        raise GraphError(
            f"stage {spec.name!r}: {name} lacks iterate(epoch, rank, world_size, start), which yields (position, "
            "item): define it, or define positions and read and set random_access = True"
        )


def check_level(spec: StageSpec, operator: Operator, levels: list[str], upstream: tuple[Edge, ...]) -> None:
    """The stage takes what the stages above it give."""
    if operator.needs == "any":
        return
    for level, edge in zip(levels, upstream, strict=True):
        if level in operator.needs.split("|"):
            continue
        remedy = {
            "batches": "put MicroBatches() after it",
            "batch": "put Unbatch() between them",
            "sample": "put Batch(n) between them",
        }.get(level, "put Load() after the source of shards")
        plural = {"sample": "samples", "batch": "batches", "batches": "lists of batches", "part": "shards"}
        wanted = " or ".join(plural[need] for need in operator.needs.split("|"))
        raise GraphError(
            f"stage {spec.name!r}: {operator.name} takes {wanted}, but {edge.stage!r} gives {plural[level]}; {remedy}"
        )


def _dependence(operator: Operator) -> str:
    """Why what an operator makes of a sample cannot be kept for other epochs."""
    words = [] if operator.depends_on is None else operator.depends_on.split("|")
    if wrong := [word for word in words if word not in DEPENDENCES]:
        return f"declares depends_on with {wrong[0]!r}, which is not one of {', '.join(DEPENDENCES)}"
    if not words:
        return (
            'does not declare what its result depends on: write depends_on = "item" in its class, or add "place" (it '
            'reads positions), "epoch" or "random" (it uses random numbers), as in "item|epoch"'
        )
    if "random" in words:
        return "uses random numbers, which must differ in every epoch"
    return (
        f"depends on its {' and '.join(word for word in words if word != 'item')}, which every epoch changes"
    )


def check_cache(plan: Plan, stage: StagePlan) -> None:
    """Raises GraphError where a cache could change what is delivered; says why."""
    for above in lineage_above(stage, plan.stages):
        operator, source = above.operator, above.source
        why = None
        if source is not None:
            if not source.random_access:
                why = f"its source {above.name!r} ({operator.name}) is not random-access"
            elif source.index_of is None:
                why = (
                    f"its source {above.name!r} ({operator.name}) does not say which sample is at a position of an "
                    "epoch: define index_of(position, epoch), which returns the sample's index in the data"
                )
        elif not above.one_to_one:
            why = f"{above.name!r} ({operator.name}) is not one-to-one"
        elif above.work.depends_on != "item":
            why = f"{above.name!r} ({operator.name}) {_dependence(above.work)}"
        elif above.work.stateful or above.caches:
            why = f"{above.name!r} ({operator.name}) has state of its own"
        if why is None and len(plan.consumers(above.name)) > 1:
            why = f"{above.name!r} feeds other stages too, which need it in every epoch"
        if why is not None:
            raise GraphError(
                f"stage {stage.name!r}: Cache cannot be used here: {why}; move it further up, or leave it out"
            )
