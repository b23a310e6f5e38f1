"""Makes a plan of a graph: checks, placement, sizes, rewrites, and what a tuner may change while it runs. Pure."""

from __future__ import annotations

from dataclasses import replace

from pipegraph.backends import PROCESS, THREAD, StageBackend
from pipegraph.contracts import Operator
from pipegraph.errors import GraphError, shown
from pipegraph.graph import Graph, Node
from pipegraph.machine import lacking_for_processes
from pipegraph.planning.checks import (
    check_cache,
    check_fan_out,
    check_iterators,
    check_level,
    check_order,
    check_policy,
    check_source,
    check_state,
)
from pipegraph.planning.kind import KindOf, StageKind
from pipegraph.planning.plan import (
    BATCHES_PER_WORKER,
    LIGHT_BATCHES,
    SAMPLES_PER_QUEUE,
    Plan,
    StagePlan,
    lineage_above,
)
from pipegraph.planning.rewrites import (
    Draft,
    bundle_rows,
    choose_memory,
    fuse,
    leave_out_copies,
    read_below,
    read_in_rows,
)
from pipegraph.stage_spec import Edge, StageSpec


def make_plan(graph: Graph, output: Node | str | None, kind_of: KindOf) -> Plan:
    """See :meth:`pipegraph.graph.Graph.plan`."""
    asked = _output_edge(graph, output)
    draft = Draft(asked)
    for name in _ancestors(graph, asked):
        draft[name] = _plan_stage(graph.stages[name], draft, kind_of)
    for rewrite in (leave_out_copies, read_in_rows, read_below, fuse, choose_memory):
        rewrite(draft)
    check_iterators(draft)
    for cache in [stage for stage in draft.values() if stage.caches]:
        for each in (cache, *lineage_above(cache, draft)):
            draft.change(each.name, cached_in=cache.name)
    bundle_rows(draft)
    mark_tuned(draft)
    inelastic = tuple(stage.name for stage in draft.running() if not _is_elastic(stage))
    plan = Plan(graph.name, graph.seed, draft, draft.shortcut(asked), inelastic, asked)
    for stage in plan.running:
        if stage.caches:
            check_cache(plan, stage)
        check_fan_out(plan, stage)
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


def _plan_stage(spec: StageSpec, draft: Draft, kind_of: KindOf) -> StagePlan:
    upstream = tuple(draft.shortcut(edge) for edge in spec.upstream)
    above = [draft[edge.stage] for edge in upstream]
    if (bind := spec.operator.traits.bind) is not None:
        spec = replace(spec, operator=bind([stage.operator for stage in above]))
    operator, traits, kind = spec.operator, spec.operator.traits, kind_of(spec.operator)
    notes: list[str] = []
    backend = _placed(spec, kind, notes)
    fixed = kind.fixed(operator)
    check_policy(spec, operator, kind, fixed)
    workers = spec.workers
    alone = fixed or ("an inline stage runs in its consumer" if backend.in_consumer else None)
    if workers > 1 and alone is not None:
        notes.append(f"{'runs' if above else 'reads'} with 1 worker instead of {workers}: {alone}")
        workers = 1
    if isinstance(operator, Operator):
        check_state(spec, operator, kind)
        check_level(spec, operator, above)
    else:
        check_source(spec, operator)
    unordered = any(stage.unordered_above for stage in above)
    if unordered:
        check_order(spec, traits)
    notes += traits.notes()
    if traits.pairs:
        notes += _shifting(upstream, draft)
    if not spec.ordered and workers == 1:
        notes.append("with one worker it is always in order")
    level = kind.level(operator, [stage.level for stage in above])
    capacity = spec.capacity
    if capacity is None:
        whole = level.startswith("batch") or (level == "part" and (above or fixed is not None))
        capacity = BATCHES_PER_WORKER * workers if whole else max(SAMPLES_PER_QUEUE, 2 * workers)
        capacity = LIGHT_BATCHES if traits.stacks else capacity
    return StagePlan(
        spec,
        upstream,
        workers,
        backend,
        capacity,
        level,
        # By what was asked for and not by the workers: those may change between save and load, and cursors may not.
        unordered or (not spec.ordered and kind.overtakes(operator)),
        kind,
        traits.needless() or "",
        tuple(notes),
    )


def _placed(spec: StageSpec, kind: StageKind, notes: list[str]) -> StageBackend:
    """Where a stage runs: its backend, or a thread for what cannot leave the trainer."""
    if spec.backend is None:
        return _chosen(spec, notes)
    why = None if spec.backend.in_trainer else kind.stays(spec.operator)
    if why is None:
        return spec.backend
    if spec.timeout is not None:
        raise GraphError(f"stage {spec.name!r}: timeout= is for work on items, and {why}; leave it out")
    notes.append(f"runs in a thread: {why}")
    return THREAD


def _chosen(spec: StageSpec, notes: list[str]) -> StageBackend:
    """Threads, but where so many of them would wait for the interpreter's lock."""
    most = spec.operator.traits.most_threads
    if most is None or spec.workers <= most:
        return THREAD
    if lacking := lacking_for_processes():
        notes.append(
            f"runs in threads: processes would be faster, and this system has no {', '.join(lacking)}"
        )
        return THREAD
    notes.append(
        f'runs in processes: more than {most} threads wait for each other (backend="thread" has them)'
    )
    return PROCESS


def _shifting(upstream: tuple[Edge, ...], draft: Draft) -> list[str]:
    """Stages above some inputs of a ``Zip`` whose failures change what is paired."""
    inputs: list[list[str]] = []
    for edge in upstream:
        above = [edge.stage]
        for name in above:  # grows on the way up
            above += [each.stage for each in draft[name].upstream if each.stage not in above]
        inputs.append(above)
    return [
        f"pairs items by their order: what {name!r} leaves out (Skip) shifts one input; do what may fail behind it"
        for name, stage in draft.items()
        if stage.spec.skip is not None and 0 < sum(name in above for above in inputs) < len(inputs)
    ]


def _is_elastic(stage: StagePlan) -> bool:
    return stage.kind.elastic(stage) and not (stage.spec.skip is not None and stage.upstream)


WORKERS, CAPACITY = "workers", "capacity"


def mark_tuned(draft: Draft) -> None:
    """Say for each stage what of that which its user left to the tuner can be tuned, and why the rest cannot."""
    for stage in draft.running():
        asked, why = stage.spec.tuned, _why_fixed(stage)
        fixed = f"workers='auto' means {stage.workers} here: {why}"
        notes = [fixed] if WORKERS in asked and why is not None else []
        draft.change(stage.name, *notes, tuned=_possible(stage, asked))


def tune_all(plan: Plan) -> Plan:
    """The plan with everything tuned that can be."""
    everything = {
        stage.name: replace(stage, tuned=_possible(stage, (WORKERS, CAPACITY))) for stage in plan.running
    }
    return replace(plan, stages={**plan.stages, **everything})


def why_not_tuned(plan: Plan) -> str:
    """For the error about a loader of which nothing is tuned."""
    asked = [stage.name for stage in plan.stages.values() if stage.spec.tuned]
    if asked:
        names = ", ".join(map(repr, asked))
        return f"this loader is not tuned: 'auto' cannot be kept in {names}; print(graph.plan()) says why"
    return "this loader is not tuned: make it with graph.loader(autotune=True), or give stages workers='auto'"


def _possible(stage: StagePlan, asked: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(each for each in asked if each == CAPACITY or _why_fixed(stage) is None)


def _why_fixed(stage: StagePlan) -> str | None:
    """Why the number of a stage's workers cannot change while it runs."""
    cached = f"what {stage.cached_in!r} knows already is passed over by a fixed set of workers"
    return (
        stage.backend.why_fixed or stage.kind.fixed(stage.operator) or (cached if stage.cached_in else None)
    )
