"""The plan: what will run, with sizes, placement and rewrites. Pure and printable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from pipegraph.backends import StageBackend
from pipegraph.bundle import Pack
from pipegraph.contracts import FanOut, History, Operator, Source, Traits
from pipegraph.planning.kind import StageKind
from pipegraph.stage_spec import Edge, StageSpec
from pipegraph.units import shorten

SAMPLES_PER_QUEUE = 64
"""Default capacity of a queue of samples: a hand-over to another thread costs ten items' work, so
queues of cheap items must be long enough to pay it rarely. Measured in benchmarks/hop_cost.py."""

BATCHES_PER_WORKER = 2
"""Default capacity of a queue of batches, per worker: one in work, one ready."""

LIGHT_BATCHES = 8
"""The same of a ``Batch``, while its batches are light (``contents.LIGHT_BYTES``): several are handed over together."""


_PLURAL = {"batch": "batches", "batches": "lists"}


@dataclass(frozen=True, eq=False, repr=False)
class StagePlan:
    """One stage as it will run.

    Attributes:
        level: ``"sample"``, ``"batch"`` or ``"part"``: what its output is.
        unordered_above: whether it lies below (or is) a completion-order stage.
        kind: of its operator: all that planner, engine and states ask about that.
        left_out: why it does not run; "" if it does.
        within: the stage that does its work (it is left out itself), or None.
        fused: for that stage, the operator that does the work of both.
        notes: rewrites and hints, in words.
        memory: what its slabs lie in: ``"pinned"`` where copies to a device alone read them, ``"delivered"`` (pinned,
            and torch's own) where others read them too, ``"staged"`` (ordinary memory, laid out for one copy) where
            another copy does, else ``"pageable"``.
        bundle: the ``Batch`` with which the bundles of this stage's rows end.
        bundle_rows: rows of its output that may be handed over together.
        cached_in: the ``Cache`` below that keeps its results, or itself.
        tuned: what the tuner may change while it runs: ``"workers"``, ``"capacity"``.
    """

    spec: StageSpec
    upstream: tuple[Edge, ...]
    workers: int
    backend: StageBackend
    capacity: int
    level: str
    unordered_above: bool
    kind: StageKind
    left_out: str = ""
    notes: tuple[str, ...] = ()
    memory: str = "pageable"
    within: str | None = None
    fused: Operator | None = None
    bundle: str | None = None
    bundle_rows: int = 1
    tuned: tuple[str, ...] = ()
    cached_in: str | None = None

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.spec.name

    @property
    def heavy_capacity(self) -> int | None:
        """The items that its queue holds whatever their size; None: ``capacity``."""
        if self.spec.capacity is not None:
            return None
        if self.bundle_rows > 1:
            return SAMPLES_PER_QUEUE
        return BATCHES_PER_WORKER if self.traits.stacks else None

    @property
    def runs(self) -> bool:
        """Whether it has workers of its own."""
        return not self.left_out

    @property
    def unit(self) -> str:
        """What its queue counts: ``"samples"``, ``"batches"``, ``"parts"``."""
        return _PLURAL.get(self.level, self.level + "s")

    @property
    def operator(self) -> Operator | Source:
        """What it does."""
        return self.spec.operator if self.fused is None else self.fused

    @property
    def source(self) -> Source | None:
        """Its operator, if that is a source."""
        operator = self.operator
        return operator if isinstance(operator, Source) else None

    @property
    def work(self) -> Operator:
        """Its operator; only for stages that are not sources."""
        return cast(Operator, self.operator)

    @property
    def one_to_one(self) -> bool:
        """Whether each item of its input becomes one of its output, independently of others."""
        return self.kind.one_to_one(self.operator)

    @cached_property
    def traits(self) -> Traits:
        """What its operator is and can."""
        return self.operator.traits

    @property
    def caches(self) -> bool:
        """Whether it is a cache that runs, for which the source skips the stages above."""
        return self.traits.caches and self.runs

    @property
    def draws_resumably(self) -> bool:
        """Whether a sampler draws its positions from generators that a state can hold."""
        return self.traits.sampled and self.traits.resumable

    def group_size(self, world_size: int = 1) -> int | None:
        """For a regrouping operator that takes blocks: rows in one of its groups."""
        operator: Any = self.operator
        return operator.group_size(world_size) if self.kind.collects and self.traits.blocks else None

    def packing(self) -> Pack | None:
        """For a regrouping operator that takes blocks: a function that packs rows for it in the thread that makes them.

        The function is thread-safe. It returns an object with ``part(start, stop)``, ``rows()`` and ``buffers()``, or
        None for rows that it cannot pack.
        """
        operator: Any = self.operator
        return operator.packing() if self.kind.collects and self.traits.blocks else None

    @property
    def outputs(self) -> int:
        """The number of its outputs."""
        return cast(FanOut, self.operator).outputs if self.kind.sends_in_turn else 1

    @property
    def remote(self) -> bool:
        """Whether its workers call their operators through a host: in processes or actors."""
        return not self.backend.in_trainer

    @property
    def pinned(self) -> bool:
        """Whether its slabs lie in pinned memory. Those of other processes do not: the copy gathers their batches."""
        return self.memory == "pinned" and self.backend.in_trainer

    @property
    def several(self) -> bool:
        """Whether it has several workers, or may come to have them."""
        return self.workers > 1 or "workers" in self.tuned


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A graph after checks and rewrites.

    Attributes:
        stages: in topological order, those that were left out included.
        output: the edge whose chunks the loader delivers.
        asked: the edge that was asked for, which may be that of a stage that was left out.
    """

    graph_name: str
    seed: int | None
    stages: Mapping[str, StagePlan]
    output: Edge
    inelastic: tuple[str, ...] = field(default=())
    asked: Edge | None = None

    @property
    def running(self) -> list[StagePlan]:
        """The stages that run, in topological order."""
        return [stage for stage in self.stages.values() if stage.runs]

    @property
    def elastic(self) -> bool:
        """Whether a state can be loaded at another world size."""
        return not self.inelastic

    @property
    def one_place(self) -> bool:
        """Whether a rank's part of a state, taken at the same step, is every rank's."""
        return self.elastic and all(stage.spec.skip is None for stage in self.running)

    def unknown_counts(self) -> list[str]:
        """Stages that make the number of chunks depend on the data."""
        return [
            stage.name
            for stage in self.running
            if stage.spec.skip is not None or not stage.kind.has_length(stage)
        ]

    def steps(
        self, epoch: int, rank: int, world_size: int, seed: int | None, history: History = ()
    ) -> int | None:
        """Chunks that a rank delivers in an epoch, None where the data decides.

        Args:
            seed: by which samples are dealt; None before the ranks have agreed on one.
            history: what was consumed of this epoch at other world sizes.
        """
        found: dict[str, int | None] = {}
        for stage in self.running:
            skips = stage.spec.skip is not None
            given = [found[edge.stage] for edge in stage.upstream]
            count = stage.kind.steps(stage, given, epoch, rank, world_size, seed, history)
            found[stage.name] = None if skips and stage.upstream else count
        return found[self.output.stage]

    def consumers(self, name: str) -> list[tuple[str, int, int]]:
        """``(stage, input index, output index)`` of each running stage that reads from ``name``."""
        return [
            (stage.name, index, edge.output)
            for stage in self.running
            for index, edge in enumerate(stage.upstream)
            if edge.stage == name
        ]

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("stage", "operator", "workers", "backend", "queue", "from")]
        for stage in self.stages.values():
            sources = ", ".join(edge.stage for edge in stage.upstream)
            cells = "-", "left out" if stage.within is None else "fused", "-"
            if stage.runs:
                workers = f"{stage.workers}{' auto' if 'workers' in stage.tuned else ''}"
                workers += "" if stage.spec.ordered else " unordered"
                cells = workers, stage.backend, f"{stage.capacity} {stage.unit}"
            rows.append((stage.name, type(stage.operator).__name__, *cells, sources))
        return rows

    def __str__(self) -> str:
        rows = self._rows()
        limits = (22, 16, 12, 9, 12, 26)
        cells = [[shorten(cell, limit) for cell, limit in zip(row, limits, strict=True)] for row in rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(limits))]
        lines = [f"plan of graph {self.graph_name!r}, seed {self.seed}"]
        lines += ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        return "\n".join([*lines, *self._remarks()])

    def _remarks(self) -> list[str]:
        lines: list[str] = []
        for stage in self.stages.values():
            if not stage.runs:
                lines.append(f"{stage.name}: {'left out: ' if stage.within is None else ''}{stage.left_out}")
            lines += [f"{stage.name}: {note}" for note in stage.notes]
        lines.append(f"delivers: {self.output.stage}")
        if self.inelastic:
            because = ", ".join(self.inelastic)
            lines.append(f"resumes at another world size only from all ranks' states, because of: {because}")
        else:
            lines.append("elastic: resumes at any world size")
        return lines


def lineage_above(stage: StagePlan, planned: Mapping[str, StagePlan]) -> list[StagePlan]:
    """The single-input chain from a stage's input up to its source, nearest first."""
    chain = []
    while stage.upstream:
        stage = planned[stage.upstream[0].stage]
        chain.append(stage)
    return chain
