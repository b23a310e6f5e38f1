"""Makes a plan of a graph: checks, placement, sizes, rewrites. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipegraph.backends import THREAD
from pipegraph.contracts import ONE_TO_ONE, Operator
from pipegraph.errors import GraphError, shown
from pipegraph.graph import Graph, Node
from pipegraph.planning.bundle_chains import bundle_rows
from pipegraph.planning.checks import (
    check_cache,
    check_iterators,
    check_level,
    check_policy,
    check_source,
    check_state,
)
from pipegraph.planning.kind import KindOf
from pipegraph.planning.plan import BATCHES_PER_WORKER, SAMPLES_PER_QUEUE, Plan, StagePlan, lineage_above
from pipegraph.planning.rewrites import (
    choose_memory,
    fuse,
    leave_out_copies,
    part_inline,
    read_in_rows,
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
    fuse(planned, edge)
    part_inline(planned)
    choose_memory(planned, edge)
    for name, stage in list(planned.items()):  # a rewrite may have put another operator in its place
        planned[name] = replace(stage, kind=kind_of(stage.operator))
    edge = shortcut(edge, planned)
    check_iterators(planned)
    for cache in [stage for stage in planned.values() if stage.caches]:
        for each in (cache, *lineage_above(cache, planned)):
            planned[each.name] = replace(each, cached_in=cache.name)
    bundle_rows(planned, edge)
    mark_tuned(planned)
    inelastic = tuple(
        stage.name for stage in planned.values() if stage.bypassed is None and not _is_elastic(stage)
    )
    plan = Plan(graph.name, graph.seed, planned, edge, inelastic, asked)
    for stage in plan.running:
        if stage.caches:
            check_cache(plan, stage)
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
        raise GraphError(f"output must be a node or a stage's name, got {shown(output)}")
    sinks = graph.sinks()
    if not graph.stages:
        raise GraphError(
            f"graph {graph.name!r} is empty: add a source first, graph.add(ops.FromIterable(...))"
        )
    if len(sinks) != 1:
        raise GraphError(
            f"graph {graph.name!r} has {len(sinks)} sinks ({', '.join(sinks)}): name one with output= "
            "(on the command line: --output)"
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
    images = planned[upstream[0].stage].images if upstream else None
    if (bind := operator.traits.bind) is not None:
        operator = bind([planned[edge.stage].operator for edge in upstream], images)
        spec = replace(spec, operator=operator)
    traits = operator.traits
    kind = kind_of(operator)
    levels = [planned[edge.stage].level for edge in upstream]
    notes: list[str] = []
    if spec.on_error != "raise":
        check_policy(spec, operator, kind)
    backend = spec.backend
    if not backend.in_trainer:
        why = kind.stays(operator)
        if why is not None:
            if spec.timeout is not None:
                raise GraphError(
                    f"stage {spec.name!r}: timeout= is for work on items, and {why}; leave it out"
                )
            notes.append(f"runs in a thread: {why}")
            backend = THREAD
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
        check_state(spec, operator, kind)
        check_level(spec, operator, levels, upstream)
        bypassed = traits.needless()
        notes += traits.notes()
    else:
        check_source(spec, operator)
    if spec.backend.in_consumer and workers > 1:
        notes.append(f"runs with 1 worker instead of {workers}: an inline stage runs in its consumer")
        workers = 1
    level = kind.level(operator, levels)
    unordered = any(planned[edge.stage].unordered_above for edge in upstream)
    if unordered and traits.pairs:
        raise GraphError(
            f"stage {spec.name!r}: Zip pairs items by their order, but a stage above it runs with ordered=False; "
            "make it ordered=True"
        )
    if traits.pairs:
        notes += _shifting(upstream, planned)
    if unordered and traits.needs_order:
        puts = "puts samples together in the order in which they come"
        needs = "depends on the order of its samples" if operator.kind in ONE_TO_ONE else puts
        raise GraphError(
            f"stage {spec.name!r}: {operator.name} {needs}, but a stage above it runs with ordered=False; make it "
            "ordered=True"
        )
    if not spec.ordered and workers == 1:
        notes.append("with one worker it is always in order")
    # By what was asked for and not by the workers: those may change between save and load, and cursors may not.
    unordered = unordered or (not spec.ordered and kind.overtakes(operator))
    capacity = spec.capacity
    if capacity is None:
        capacity = (
            BATCHES_PER_WORKER * workers if level.startswith("batch") else max(SAMPLES_PER_QUEUE, 2 * workers)
        )
        if level == "part" and (upstream or fixed is not None):
            capacity = BATCHES_PER_WORKER  # whole shards; else single samples of shards
    return StagePlan(
        spec,
        upstream,
        workers,
        backend,
        capacity,
        level,
        unordered,
        kind,
        bypassed,
        tuple(notes),
        images=images if traits.images == "same" else traits.images,
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
        if stage.spec.skip is not None and 0 < sum(name in above for above in inputs) < len(inputs)
    ]


def _is_elastic(stage: StagePlan) -> bool:
    return stage.kind.elastic(stage) and not (stage.spec.skip is not None and stage.upstream)
