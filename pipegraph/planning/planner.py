"""Makes a plan of a graph: checks, placement, sizes, rewrites. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from pipegraph.backends import THREAD
from pipegraph.capabilities import FollowsRoute, Planned, RowOperator, functions_of
from pipegraph.contracts import DEPENDENCES, STATE_METHODS, Fact, FanIn, Operator, Source
from pipegraph.errors import GraphError
from pipegraph.global_generators import draws_from
from pipegraph.graph import Graph, Node
from pipegraph.planning.bundle_chains import bundle_rows
from pipegraph.planning.kind import KindOf, StageKind
from pipegraph.planning.plan import BATCHES_PER_WORKER, SAMPLES_PER_QUEUE, Plan, StagePlan, lineage_above
from pipegraph.planning.rewrites import (
    choose_memory,
    fuse,
    fuse_processes,
    leave_out_copies,
    part_inline,
    read_in_rows,
    read_remotely,
    repeat_sources,
    shortcut,
)
from pipegraph.planning.tunable import mark_tuned
from pipegraph.stage_spec import Edge, StageSpec


def make_plan(graph: Graph, output: Node | str | None, kind_of: KindOf) -> Plan:
    """See :meth:`pipegraph.graph.Graph.plan`."""
    asked = edge = _output_edge(graph, output)
    order = _ancestors(graph, edge)
    planned: dict[str, StagePlan] = {}
    for name in order:
        planned[name] = _plan_stage(graph.stages[name], planned, kind_of)
    repeat_sources(planned, edge)
    leave_out_copies(planned, edge)
    read_in_rows(planned, edge)
    read_remotely(planned, edge)
    fuse(planned, edge)
    part_inline(planned)
    choose_memory(planned, edge)
    fuse_processes(planned, edge)
    for name, stage in list(planned.items()):  # a rewrite may have put another operator in its place
        planned[name] = replace(stage, kind=kind_of(stage.operator))
    edge = shortcut(edge, planned)
    _pair_routes(planned, edge)
    for stage in planned.values():
        _check_substitutes(stage, planned)
    bundle_rows(planned, edge)
    mark_tuned(planned)
    inelastic = tuple(
        stage.judged for stage in planned.values() if stage.bypassed is None and not _is_elastic(stage)
    )
    plan = Plan(graph.name, graph.seed, planned, edge, inelastic, asked)
    for stage in plan.running:
        if stage.caches:
            _check_cache(plan, stage)
    return plan


def _output_edge(graph: Graph, output: Node | str | None) -> Edge:
    if isinstance(output, Node):
        if output.graph is not graph:
            raise GraphError(
                f"output node {output.name!r} belongs to graph {output.graph.name!r}, not {graph.name!r}"
            )
        return output._edge
    if isinstance(output, str):
        if output not in graph.stages:
            known = ", ".join(graph.stages) or "none"
            raise GraphError(f"graph {graph.name!r} has no stage {output!r} to deliver from; it has: {known}")
        return Edge(output)
    if output is not None:
        raise GraphError(f"output must be a node or a stage's name, got {output!r}")
    sinks = graph.sinks()
    if not graph.stages:
        raise GraphError(
            f"graph {graph.name!r} is empty: add a source first, graph.add(ops.FromIterable(...))"
        )
    if len(sinks) != 1:
        raise GraphError(
            f"graph {graph.name!r} has {len(sinks)} sinks ({', '.join(sinks)}): name one with output="
        )
    return Edge(sinks[0])


def _ancestors(graph: Graph, output: Edge) -> list[str]:
    """The stages that run, in topological order: the order they were added in, which puts every upstream first."""
    needed = {output.stage}
    for name, spec in reversed(graph.stages.items()):
        if name in needed:
            needed.update(edge.stage for edge in spec.upstream)
    return [name for name in graph.stages if name in needed]


def _plan_stage(spec: StageSpec, planned: Mapping[str, StagePlan], kind_of: KindOf) -> StagePlan:
    operator = spec.operator
    upstream = tuple(shortcut(edge, planned) for edge in spec.upstream)
    bound = operator.can(Planned)
    if bound is not None:
        operator = bound.bind([planned[edge.stage].operator for edge in upstream])
        spec = replace(spec, operator=operator)
    kind = kind_of(operator)
    levels = [planned[edge.stage].level for edge in upstream]
    notes: list[str] = []
    if spec.on_error != "raise":
        _check_policy(spec, operator, kind)
    backend = spec.backend
    if not backend.in_trainer:
        why = kind.stays(operator)
        if why is not None:
            notes.append(f"runs in a thread: {why}")
            backend = THREAD
    if spec.timeout is not None:
        _check_timeout(spec, operator, kind)
    workers = spec.workers
    bypassed = None
    fixed = kind.fixed(operator)
    if workers > 1 and fixed is not None:
        verb = "runs" if upstream else "reads"
        notes.append(f"{verb} with 1 worker instead of {workers}: {fixed}")
        workers = 1
    if not upstream and spec.on_error != "raise" and fixed is not None:
        raise GraphError(
            f"stage {spec.name!r}: on_error={spec.on_error!r} needs a random-access source (FromSequence, "
            f"ListFiles); {operator.name} ends with its first error. Put the work that may fail into a stage behind it"
        )
    if isinstance(operator, Operator):
        _check_state(spec, operator, kind)
        _check_level(spec, operator, levels, upstream)
        if (bound := operator.can(Planned)) is not None:
            bypassed = bound.bypass()
            notes += bound.notes()
    if spec.backend.in_consumer and workers > 1:
        notes.append(f"runs with 1 worker instead of {workers}: an inline stage runs in its consumer")
        workers = 1
    level = kind.level(operator, levels)
    unordered = any(planned[edge.stage].unordered_above for edge in upstream)
    pairs = Fact.PAIRS in operator.facts
    if unordered and pairs:
        raise GraphError(
            f"stage {spec.name!r}: Zip pairs items by their order, but a stage above it runs with ordered=False; "
            "make it ordered=True"
        )
    if pairs:
        notes += _shifting(upstream, planned)
    if unordered and Fact.NEEDS_ORDER in operator.facts:
        raise GraphError(
            f"stage {spec.name!r}: {operator.name} puts samples together in the order in which they come, but a stage "
            "above it runs with ordered=False; make it ordered=True"
        )
    if not spec.ordered and workers == 1:
        notes.append("with one worker it is always in order")
    # By what was asked for and not by the workers: those may change between save and load, and cursors may not.
    unordered = unordered or (not spec.ordered and kind.overtakes(operator))
    if backend.in_trainer and (drawn := draws_from(functions_of(operator))):
        notes.append(
            f"draws from {' and '.join(drawn)}, which all threads share: its numbers differ from run to run. Draw from "
            "a parameter rng, or use backend='process'"
        )
    capacity = spec.capacity
    if capacity is None:
        capacity = (
            BATCHES_PER_WORKER * workers if level.startswith("batch") else max(SAMPLES_PER_QUEUE, 2 * workers)
        )
        if level == "part" and (upstream or fixed is not None):
            capacity = BATCHES_PER_WORKER  # whole shards; else single samples of shards
    return StagePlan(
        spec, upstream, workers, backend, capacity, level, unordered, kind, bypassed, tuple(notes)
    )


def _shifting(upstream: tuple[Edge, ...], planned: Mapping[str, StagePlan]) -> list[str]:
    """Stages above some inputs of a ``Zip`` whose failures change what is paired."""
    inputs: list[list[str]] = []
    for edge in upstream:
        above = [edge.stage]
        for name in above:  # grows on the way up
            above += [each.stage for each in planned[name].upstream if each.stage not in above]
        inputs.append(above)
    return [
        f"pairs items by their order: what {name!r} leaves out (Skip) shifts one input; do what may fail behind it"
        for name, stage in planned.items()
        if stage.spec.outcome.drops and 0 < sum(name in above for above in inputs) < len(inputs)
    ]


def _check_timeout(spec: StageSpec, operator: Operator | Source, kind: StageKind) -> None:
    why = kind.stays(operator)
    if why is not None:
        raise GraphError(f"stage {spec.name!r}: timeout= is for work on items, and {why}; leave it out")
    if spec.backend.in_consumer:
        raise GraphError(
            f"stage {spec.name!r}: timeout= needs backend='thread' or 'process': an inline stage runs in the thread of "
            "its consumer, which cannot stop waiting for itself"
        )


def _check_state(spec: StageSpec, operator: Operator, kind: StageKind) -> None:
    has = [name for name in STATE_METHODS if callable(getattr(operator, name, None))]
    name = type(operator).__name__
    said = type(operator).stateful is not Operator.stateful
    if len(has) == 2 and not operator.stateful and not said:
        raise GraphError(
            f"stage {spec.name!r}: {name} has state_dict() and load_state_dict() of a class that is no operator: say "
            "in the class what they are for, stateful = True if the stage must resume from them (in order, with one "
            "worker), else stateful = False"
        )
    if not operator.stateful:
        return
    if kind.stateless:
        raise GraphError(
            f"stage {spec.name!r}: {name} has a state_dict() and load_state_dict(), but {kind.stateless}. Say "
            "stateful = False if they are there for something else"
        )
    if len(has) < 2:
        raise GraphError(
            f"stage {spec.name!r}: {name} says stateful = True, and needs both state_dict() and load_state_dict(state)"
        )


def _check_policy(spec: StageSpec, operator: Operator | Source, kind: StageKind) -> None:
    if kind.reads_in_turn:
        several = cast(FanIn, operator).inputs == "many"
        raise GraphError(
            f"stage {spec.name!r}: on_error={spec.on_error!r} is for stages with one input; {operator.name} "
            f"{'has several' if several else 'makes nothing of it that could fail'}"
        )
    if spec.policy.retries and kind.keeps:
        raise GraphError(
            f"stage {spec.name!r}: Retry() tries one item again, but {operator.name} keeps what it was given before; "
            "put the work that may fail into a stage of its own"
        )


def _check_level(spec: StageSpec, operator: Operator, levels: list[str], upstream: tuple[Edge, ...]) -> None:
    if operator.needs == "any":
        return
    for level, edge in zip(levels, upstream, strict=True):
        if level in operator.needs.split("|"):
            continue
        remedy = {
            "batches": "put MicroBatches() behind it",
            "batch": "put Unbatch() between them",
            "sample": "put Batch(n) between them",
        }.get(level, "put Load() behind the source of shards")
        plural = {"sample": "samples", "batch": "batches", "batches": "lists of batches", "part": "shards"}
        wanted = " or ".join(plural[need] for need in operator.needs.split("|"))
        raise GraphError(
            f"stage {spec.name!r}: {operator.name} takes {wanted}, but {edge.stage!r} gives {plural[level]}; {remedy}"
        )


def _pair_routes(planned: dict[str, StagePlan], output: Edge) -> None:
    """Find for each Merge() the Route whose outputs it joins."""
    for stage in list(planned.values()):
        if not _follows_route(stage):
            continue
        above = [_route_above(edge, planned) for edge in stage.upstream]
        found = [edge for edge in above if edge is not None]
        if len(found) < len(above) or len({edge.stage for edge in found}) > 1:
            raise GraphError(
                f"stage {stage.name!r}: Merge() joins the outputs of one Route; "
                "for other inputs use Concat(), Mix(weights) or Zip()"
            )
        route, outputs = found[0].stage, tuple(edge.output for edge in found)
        if len(set(outputs)) != len(outputs):
            raise GraphError(
                f"stage {stage.name!r}: Merge() was given the same Route output twice ({list(outputs)})"
            )
        other = planned[route].merge
        if other is not None:
            raise GraphError(
                f"stage {stage.name!r}: the outputs of {route!r} are joined by {other!r} already; join them once "
                "and fan out behind that"
            )
        planned[route] = replace(planned[route], merge=stage.name, route_outputs=outputs)
        planned[stage.name] = replace(planned[stage.name], route=route, route_outputs=outputs)
        for name in _between(route, stage.name, planned):
            planned[name] = replace(planned[name], marked=True)


def _follows_route(stage: StagePlan) -> bool:
    return stage.operator.can(FollowsRoute) is not None


def _between(route: str, merge: str, planned: dict[str, StagePlan]) -> set[str]:
    """The stages through which a ``Route``'s marks pass on their way to its ``Merge``."""
    found = {edge.stage for edge in planned[merge].upstream}
    for name, stage in reversed(planned.items()):
        if name in found and name != route:
            found.update(edge.stage for edge in stage.upstream)
    return found - {route}


def _route_above(edge: Edge, planned: Mapping[str, StagePlan]) -> Edge | None:
    """The output of a Route that an edge comes from through single-input stages, and whole pairs of Route and Merge."""
    depth = 0
    while True:
        stage = planned[edge.stage]
        operator = stage.operator
        if stage.kind.sends_in_turn:
            if depth == 0:
                return edge
            depth -= 1
        if stage.kind.reads_in_turn:
            if cast(FanIn, operator).inputs == 1:
                raise GraphError(
                    f"stage {stage.name!r}: {operator.name} ends an epoch, so it cannot stand between a Route and its "
                    "Merge; put it behind the Merge"
                )
            if not _follows_route(stage):
                return None
            depth += 1
        if not stage.upstream:
            return None
        edge = stage.upstream[0]


def _check_substitutes(stage: StagePlan, planned: Mapping[str, StagePlan]) -> None:
    policy = stage.spec.outcome
    if not policy.substitutes:
        return
    word = type(policy).__name__
    if stage.source is None and not stage.one_to_one:
        raise GraphError(
            f"stage {stage.name!r}: {word}() works for one-to-one stages, not for {stage.operator.name}"
        )
    chain = lineage_above(stage, planned)
    whole = stage.source is None and chain[0].level == "batch"
    if whole and not (stage.operator.can(RowOperator) and policy.neighbours):
        raise GraphError(
            f"stage {stage.name!r}: {word}() puts one sample in another's place, but this function fails for a whole "
            "batch; move it before Batch"
        )
    for above in chain if policy.neighbours else ():
        operator = above.operator
        if above.source is not None:
            if not above.source.random_access:
                raise GraphError(
                    f"stage {stage.name!r}: {word}() needs a random-access source, and {above.name!r} "
                    f"({operator.name}) is not one; use FromSequence or ListFiles, or Skip()"
                )
        elif not above.work.elastic or above.kind.expands:
            raise GraphError(
                f"stage {stage.name!r}: {word}() needs only one-to-one stages or Batch between it and its source, "
                f"and {above.name!r} is a {operator.name}; use Skip()"
            )


def _is_elastic(stage: StagePlan) -> bool:
    return stage.kind.elastic(stage) and not (stage.spec.outcome.drops and stage.upstream)


def _dependence(operator: Operator) -> str:
    """Why what an operator makes of a sample cannot be kept for other epochs."""
    words = [] if operator.depends_on is None else operator.depends_on.split("|")
    if wrong := [word for word in words if word not in DEPENDENCES]:
        return f"declares depends_on with {wrong[0]!r}, which is none of {', '.join(DEPENDENCES)}"
    if not words:
        return (
            'does not declare what its result depends on: write depends_on = "item" in its class, or add "place" (it '
            'reads positions), "epoch" or "random" (it draws numbers), as "item|epoch"'
        )
    if "random" in words:
        return "draws random numbers, and every epoch must draw anew"
    return (
        f"depends on its {' and '.join(word for word in words if word != 'item')}, which every epoch changes"
    )


def _check_cache(plan: Plan, stage: StagePlan) -> None:
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
        elif drawn := draws_from(functions_of(operator)):
            why = f"{above.name!r} ({operator.name}) draws from {' and '.join(drawn)}, and every epoch must draw anew"
        elif above.work.stateful or above.caches:
            why = f"{above.name!r} ({operator.name}) keeps state of its own"
        if why is None and above.spec.outcome.substitutes:
            why = f"{above.name!r} puts substitutes in other samples' places ({type(above.spec.outcome).__name__})"
        if why is None and len(plan.consumers(above.name)) > 1:
            why = f"{above.name!r} feeds other stages too, which need it in every epoch"
        if why is not None:
            raise GraphError(
                f"stage {stage.name!r}: Cache cannot stand here: {why}; move it up, or leave it out"
            )
