"""Checks of a stage in its graph: its options, its policy, its input, and caches. Pure.

Each raises a GraphError that names the stage, the rule and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipegraph.contracts import DEPENDENCES, STATE_METHODS, Operator, Source, Traits
from pipegraph.errors import GraphError
from pipegraph.planning.kind import StageKind
from pipegraph.planning.plan import Plan, StagePlan, lineage_above
from pipegraph.stage_spec import StageSpec


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


def check_policy(spec: StageSpec, operator: Operator | Source, kind: StageKind, fixed: str | None) -> None:
    """A policy needs one input, and a stage that can try an item again.

    Args:
        fixed: why the stage has a single worker, if it must.
    """
    if spec.on_error == "raise":
        return
    policy = f"stage {spec.name!r}: on_error={spec.on_error!r}"
    if not spec.upstream and fixed is not None:
        raise GraphError(
            f"{policy} needs a random-access source (FromSequence, ListFiles); {operator.name} ends with its first "
            "error. Put the work that may fail into a stage behind it"
        )
    if kind.reads_in_turn:
        raise GraphError(f"{policy} is for work on items that can fail; {operator.name} only hands them on")
    if spec.retry.times and kind.keeps:
        raise GraphError(
            f"stage {spec.name!r}: Retry() tries one item again, but {operator.name} holds "
            "earlier items; put the work that may fail into a separate stage"
        )


def check_order(spec: StageSpec, traits: Traits) -> None:
    """A stage below one with ``ordered=False`` does not go by the order of its items."""
    if traits.pairs or traits.needs_order:
        raise GraphError(
            f"stage {spec.name!r}: {type(spec.operator).__name__} {'pairs' if traits.pairs else 'takes'} items by "
            "their order, but a stage above it runs with ordered=False; make it ordered=True"
        )


def check_fan_out(plan: Plan, stage: StagePlan) -> None:
    """Several stages read what is in an order that a restart need not repeat: each would be at another place in it."""
    joined = [
        s for s in (stage, *lineage_above(stage, plan.stages)) if len(s.upstream) > 1 and s.unordered_above
    ]
    if joined and len(plan.consumers(stage.name)) > 1:
        raise GraphError(
            f"stage {stage.name!r}: several stages read it, and {joined[0].name!r} joins inputs of which one lies "
            "below a stage with ordered=False, so they may come in another order behind a resume; make it ordered=True"
        )


def check_source(spec: StageSpec, source: Source) -> None:
    """A source has the methods by which its items are read."""
    kind = type(source)
    missing = [each for each in ("positions", "read") if getattr(kind, each) is getattr(Source, each)]
    if missing and source.random_access:
        raise GraphError(
            f"stage {spec.name!r}: {kind.__name__} has random_access = True, but lacks {' and '.join(missing)}: define "
            "positions(epoch, rank, world_size, start) and read(position, epoch)"
        )
    if missing and kind.iterate is Source.iterate:
        raise GraphError(
            f"stage {spec.name!r}: {kind.__name__} lacks iterate(epoch, rank, world_size, start), which yields "
            "(position, item): define it, or define positions and read and set random_access = True"
        )


_PLURAL = {"sample": "samples", "batch": "batches", "part": "shards"}
_REMEDY = {
    "sample": "put Batch(n) between them",
    "batch": "put Unbatch() between them",
    "part": "put Load() after the source of shards",
}


def check_level(spec: StageSpec, operator: Operator, above: Sequence[StagePlan]) -> None:
    """The stage takes what the stages above it give."""
    needs = operator.needs.split("|")
    for stage in above:
        if operator.needs != "any" and stage.level not in needs:
            wanted = " or ".join(_PLURAL[need] for need in needs)
            raise GraphError(
                f"stage {spec.name!r}: {operator.name} takes {wanted}, but {stage.name!r} gives "
                f"{_PLURAL[stage.level]}; {_REMEDY[stage.level]}"
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
