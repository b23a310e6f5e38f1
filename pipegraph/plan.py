"""From a graph to what will run: checks, sizes, placement and rewrites. Pure and printable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipegraph.contracts import Merge, Operator, Regroup, Route, Source
from pipegraph.errors import GraphError, StateError
from pipegraph.graph import Edge, Graph, Node, StageSpec
from pipegraph.policies import Replace, Skip, final_policy

SAMPLES_PER_QUEUE = 64
"""Default capacity of a queue of samples: a hand-over to another thread costs ten items' work, so
queues of cheap items must be long enough to pay it rarely. Measured in benchmarks/hop_cost.py."""

BATCHES_PER_WORKER = 2
"""Default capacity of a queue of batches, per worker: one in hand, one ready."""


@dataclass(frozen=True)
class StagePlan:
    """One stage as it will run.

    Attributes:
        level: ``"sample"``, ``"batch"`` or ``"part"``: what its output is.
        unordered_above: whether it lies below (or is) a completion-order stage.
        bypassed: why it is left out, or None.
        notes: rewrites and hints, in words.
        merge: for a ``Route``, the ``Merge`` that joins its outputs again.
        route: for a ``Merge``, the ``Route`` it follows.
        route_outputs: for both, which outputs of the ``Route`` the ``Merge`` joins, in the order of its inputs.
    """

    spec: StageSpec
    upstream: tuple[Edge, ...]
    workers: int
    backend: str
    capacity: int
    level: str
    unordered_above: bool
    bypassed: str | None = None
    notes: tuple[str, ...] = ()
    merge: str | None = None
    route: str | None = None
    route_outputs: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.spec.name

    @property
    def operator(self) -> Operator | Source:
        """What it does."""
        return self.spec.operator


@dataclass(frozen=True)
class Plan:
    """A graph after checks and rewrites.

    Attributes:
        stages: in topological order, those that were left out included.
        output: the edge whose chunks the loader delivers.
    """

    graph_name: str
    seed: int | None
    stages: Mapping[str, StagePlan]
    output: Edge
    inelastic: tuple[str, ...] = field(default=())

    @property
    def running(self) -> list[StagePlan]:
        """The stages that run, in topological order."""
        return [stage for stage in self.stages.values() if stage.bypassed is None]

    @property
    def elastic(self) -> bool:
        """Whether a state can be loaded at another world size."""
        return not self.inelastic

    @property
    def counts_known(self) -> bool:
        """Whether every rank's number of chunks follows from the sources' lengths."""
        return not self.unknown_counts()

    def unknown_counts(self) -> list[str]:
        """Stages that make the number of chunks depend on the data."""
        names = []
        for stage in self.running:
            operator = stage.operator
            if isinstance(operator, Source):
                if not operator.has_length():
                    names.append(stage.name)
            elif isinstance(operator, Merge):
                if operator.merged_length([1000] * len(stage.upstream)) is None:
                    names.append(stage.name)
            elif operator.length(1000) is None:
                names.append(stage.name)
            if isinstance(final_policy(stage.spec.on_error), Skip) and stage.name not in names:
                names.append(stage.name)
        return names

    def lengths(self, epoch: int, rank: int, world_size: int) -> dict[str, int | None]:
        """Chunks per epoch that leave each stage, None where the data decides."""
        found: dict[str, int | None] = {}
        for stage in self.running:
            operator = stage.operator
            if isinstance(operator, Source):
                found[stage.name] = operator.length(epoch, rank, world_size)
                continue
            inputs = [found[edge.stage] for edge in stage.upstream]
            if any(n is None for n in inputs):
                found[stage.name] = None
            elif isinstance(operator, Merge):
                found[stage.name] = operator.merged_length([n for n in inputs if n is not None])
            else:
                count = inputs[0]
                assert count is not None
                found[stage.name] = operator.length_for(count, world_size)
        return found

    def digests(self) -> dict[str, str]:
        """A short digest per stage of what decides what it delivers."""
        found = {}
        for stage in self.running:
            operator = stage.operator
            kind = f"{type(operator).__module__}.{type(operator).__qualname__}"
            upstream = [[edge.stage, edge.output] for edge in stage.upstream]
            text = json.dumps([kind, operator.config(), upstream], sort_keys=True, default=repr)
            found[stage.name] = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        found["(output)"] = f"{self.output.stage}:{self.output.output}"
        return found

    def check_digests(self, saved: Mapping[str, str]) -> None:
        """Raises StateError naming the stages in which a saved graph differs from this one."""
        ours = self.digests()
        if dict(saved) == ours:
            return
        changed = [name for name in ours if name in saved and saved[name] != ours[name]]
        missing = [name for name in saved if name not in ours]
        added = [name for name in ours if name not in saved]
        words = [f"stage {name!r} has other parameters or inputs" for name in changed]
        words += [f"stage {name!r} of the state is not in the graph" for name in missing]
        words += [f"stage {name!r} is not in the state" for name in added]
        raise StateError(f"the state is of another graph than {self.graph_name!r}: " + "; ".join(words))

    def consumers(self, name: str) -> list[tuple[str, int, int]]:
        """``(stage, input index, output index)`` of each running stage that reads from ``name``."""
        return [
            (stage.name, index, edge.output)
            for stage in self.running
            for index, edge in enumerate(stage.upstream)
            if edge.stage == name
        ]

    def __str__(self) -> str:
        rows = [("stage", "operator", "workers", "backend", "queue", "from")]
        for stage in self.stages.values():
            sources = ", ".join(edge.stage for edge in stage.upstream)
            queue = f"{stage.capacity} {'batches' if stage.level == 'batch' else stage.level + 's'}"
            if stage.bypassed is not None:
                queue, workers, backend = "-", "-", "left out"
            else:
                workers = str(stage.workers) + ("" if stage.spec.ordered else " unordered")
                backend = stage.backend
            rows.append((stage.name, type(stage.operator).__name__, workers, backend, queue, sources))
        limits = (22, 16, 12, 9, 12, 26)
        cells = [[_shorten(cell, limit) for cell, limit in zip(row, limits, strict=True)] for row in rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(limits))]
        lines = [f"plan of graph {self.graph_name!r}, seed {self.seed}"]
        lines += ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        for stage in self.stages.values():
            if stage.bypassed is not None:
                lines.append(f"{stage.name}: left out: {stage.bypassed}")
            lines += [f"{stage.name}: {note}" for note in stage.notes]
        lines.append(f"delivers: {self.output.stage}")
        if self.inelastic:
            lines.append(f"resumes at the same world size only, because of: {', '.join(self.inelastic)}")
        else:
            lines.append("elastic: resumes at any world size")
        return "\n".join(lines)


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def make_plan(graph: Graph, output: Node | str | None = None) -> Plan:
    """See :meth:`pipegraph.graph.Graph.plan`."""
    edge = _output_edge(graph, output)
    order = _ancestors(graph, edge)
    planned: dict[str, StagePlan] = {}
    for name in order:
        planned[name] = _plan_stage(graph.stages[name], planned)
    edge = _shortcut(edge, planned)
    _pair_routes(planned, edge)
    for stage in planned.values():
        _check_replace(stage, planned)
    inelastic = tuple(
        stage.name for stage in planned.values() if stage.bypassed is None and not _is_elastic(stage)
    )
    return Plan(graph.name, graph.seed, planned, edge, inelastic)


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
    """The stages that run, in topological order (which is the order they were added in)."""
    import networkx

    digraph = graph.to_networkx()
    if not networkx.is_directed_acyclic_graph(digraph):
        cycle = " -> ".join(a for a, _ in networkx.find_cycle(digraph))
        raise GraphError(f"graph {graph.name!r} has a cycle: {cycle}")
    needed = networkx.ancestors(digraph, output.stage) | {output.stage}
    return [name for name in networkx.topological_sort(digraph) if name in needed]


def _shortcut(edge: Edge, planned: Mapping[str, StagePlan]) -> Edge:
    """The edge that carries the chunks once stages that were left out are passed over."""
    while planned[edge.stage].bypassed is not None:
        edge = planned[edge.stage].upstream[0]
    return edge


def _plan_stage(spec: StageSpec, planned: Mapping[str, StagePlan]) -> StagePlan:
    operator = spec.operator
    upstream = tuple(_shortcut(edge, planned) for edge in spec.upstream)
    if isinstance(operator, Operator):
        operator = operator.bind([planned[edge.stage].operator for edge in upstream])
        spec = replace(spec, operator=operator)
    levels = [planned[edge.stage].level for edge in upstream]
    notes: list[str] = []
    if spec.backend in ("process", "ray"):
        raise GraphError(
            f"stage {spec.name!r}: backend={spec.backend!r} is not available in this version; use backend='thread'"
        )
    if spec.timeout is not None and spec.backend == "inline":
        raise GraphError(f"stage {spec.name!r}: timeout= needs a worker to watch; use backend='thread'")
    workers = spec.workers
    bypassed = None
    if isinstance(operator, Source):
        level = operator.level
        if workers > 1 and not operator.random_access:
            notes.append(
                f"reads with 1 worker instead of {workers}: {operator.name} can only be read in sequence"
            )
            workers = 1
        if final_policy(spec.on_error) != "raise" and not operator.random_access:
            raise GraphError(
                f"stage {spec.name!r}: on_error={spec.on_error!r} needs a random-access source (FromSequence, ListFiles); "
                f"{operator.name} ends with its first error. Put the work that may fail into a stage behind it"
            )
    else:
        _check_level(spec, operator, levels, upstream)
        level = levels[0] if operator.gives == "same" else operator.gives
        if isinstance(operator, Merge):
            operator.check_inputs(len(upstream))
        if isinstance(operator, Merge) and "batch" in levels:
            level = "batch" if operator.gives == "same" else level
        if workers > 1 and (not operator.shareable or hasattr(operator, "state_dict")):
            notes.append(f"runs with 1 worker instead of {workers}: {operator.name} works in sequence")
            workers = 1
        bypassed = operator.bypass()
        notes += operator.notes()
    if spec.backend == "inline" and workers > 1:
        notes.append(f"runs with 1 worker instead of {workers}: an inline stage runs in its consumer")
        workers = 1
    unordered = any(planned[edge.stage].unordered_above for edge in upstream)
    if unordered and not isinstance(operator, Source) and operator.name == "zip":
        raise GraphError(
            f"stage {spec.name!r}: Zip pairs items by their order, but a stage above it runs with ordered=False; "
            "make it ordered=True"
        )
    if not spec.ordered and spec.backend == "inline":
        notes.append("an inline stage is always in order")
    parallel = spec.backend != "inline" and workers > 1
    unordered = unordered or (not spec.ordered and parallel)
    capacity = spec.capacity
    if capacity is None:
        capacity = BATCHES_PER_WORKER * workers if level == "batch" else max(SAMPLES_PER_QUEUE, 2 * workers)
        if level == "part" and not getattr(operator, "random_access", False):
            capacity = BATCHES_PER_WORKER  # whole shards; else single samples of shards
    return StagePlan(
        spec, upstream, workers, spec.backend, capacity, level, unordered, bypassed, tuple(notes)
    )


def _check_level(spec: StageSpec, operator: Operator, levels: list[str], upstream: tuple[Edge, ...]) -> None:
    if operator.needs == "any":
        if (
            "part" in levels
            and not isinstance(operator, Merge | Route)
            and operator.name not in ("map", "filter", "shuffle")
        ):
            raise GraphError(
                f"stage {spec.name!r}: {operator.name} takes samples, but {upstream[0].stage!r} gives shards; "
                "put Load() between them"
            )
        return
    for level, edge in zip(levels, upstream, strict=True):
        if level in operator.needs.split("|"):
            continue
        remedy = {"batch": "put Unbatch() between them", "sample": "put Batch(n) between them"}.get(
            level, "put Load() between them"
        )
        plural = {"sample": "samples", "batch": "batches", "part": "shards"}
        wanted = " or ".join(plural[need] for need in operator.needs.split("|"))
        raise GraphError(
            f"stage {spec.name!r}: {operator.name} takes {wanted}, but {edge.stage!r} gives {plural[level]}; {remedy}"
        )


def _pair_routes(planned: dict[str, StagePlan], output: Edge) -> None:
    """Find for each Merge() the Route whose outputs it joins."""
    for stage in list(planned.values()):
        operator = stage.operator
        if not isinstance(operator, Merge) or not operator.follows_route:
            continue
        routes = [_route_above(edge, planned, 0) for edge in stage.upstream]
        first = routes[0]
        if first is None or any(route is None or route[0] != first[0] for route in routes):
            raise GraphError(
                f"stage {stage.name!r}: Merge() joins the outputs of one Route; "
                "for other inputs use Concat(), Mix(weights) or Zip()"
            )
        outputs = [route[1] for route in routes if route is not None]
        if len(set(outputs)) != len(outputs):
            raise GraphError(
                f"stage {stage.name!r}: Merge() was given the same Route output twice ({outputs})"
            )
        planned[first[0]] = replace(planned[first[0]], merge=stage.name, route_outputs=tuple(outputs))
        planned[stage.name] = replace(stage, route=first[0], route_outputs=tuple(outputs))


def _route_above(edge: Edge, planned: Mapping[str, StagePlan], depth: int) -> tuple[str, int] | None:
    """The Route (and its output) that an edge comes from through single-input stages."""
    while True:
        stage = planned[edge.stage]
        operator = stage.operator
        if isinstance(operator, Route):
            if depth == 0:
                return edge.stage, edge.output
            depth -= 1
        if isinstance(operator, Merge):
            if not operator.follows_route:
                return None
            depth += 1
        if not stage.upstream:
            return None
        edge = stage.upstream[0]


def _check_replace(stage: StagePlan, planned: Mapping[str, StagePlan]) -> None:
    if not isinstance(final_policy(stage.spec.on_error), Replace):
        return
    operator = stage.operator
    if isinstance(operator, Operator) and (operator.kind != "map" or not operator.one_to_one):
        raise GraphError(
            f"stage {stage.name!r}: Replace() works for one-to-one stages, not for {operator.name}"
        )
    if (
        isinstance(operator, Operator)
        and planned[stage.upstream[0].stage].level == "batch"
        and not operator.per_sample
    ):
        raise GraphError(
            f"stage {stage.name!r}: Replace() puts one sample in another's place, but this function fails for a whole "
            "batch; move it before Batch"
        )
    for above in lineage_above(stage, planned):
        operator = above.operator
        if isinstance(operator, Source):
            if not operator.random_access:
                raise GraphError(
                    f"stage {stage.name!r}: Replace() needs a random-access source, and {above.name!r} "
                    f"({operator.name}) is not one; use FromSequence or ListFiles, or Skip()"
                )
        elif not (operator.name == "batch" or (operator.kind == "map" and operator.one_to_one)):
            raise GraphError(
                f"stage {stage.name!r}: Replace() needs only one-to-one stages or Batch between it and its source, "
                f"and {above.name!r} is a {operator.name}; use Skip()"
            )


def lineage_above(stage: StagePlan, planned: Mapping[str, StagePlan]) -> list[StagePlan]:
    """The single-input chain from a stage's input up to its source, nearest first."""
    chain = []
    while stage.upstream:
        stage = planned[stage.upstream[0].stage]
        chain.append(stage)
    return chain


def _is_elastic(stage: StagePlan) -> bool:
    operator = stage.operator
    if isinstance(operator, Source):
        return operator.elastic
    if isinstance(final_policy(stage.spec.on_error), Skip) or (not stage.spec.ordered and stage.workers > 1):
        return False
    if hasattr(operator, "state_dict"):
        return False
    if isinstance(operator, Regroup):
        return operator.elastic
    return operator.name == "unbatch" or (operator.kind == "map" and operator.one_to_one)
