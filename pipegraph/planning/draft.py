"""A plan in the making: its stages, which checks and rewrites replace one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipegraph.planning.plan import StagePlan
from pipegraph.stage_spec import Edge


class Draft(dict[str, StagePlan]):
    """The stages by name, in topological order, and the edge whose chunks the loader delivers."""

    def __init__(self, output: Edge) -> None:
        super().__init__()
        self.output = output

    def change(self, name: str, *notes: str, **changes: Any) -> StagePlan:
        """Replace some of a stage's fields; ``notes`` are added to its own."""
        stage = self[name]
        self[name] = replace(stage, **{"notes": (*stage.notes, *notes), **changes})
        return self[name]

    def running(self) -> list[StagePlan]:
        """The stages that run so far."""
        return [stage for stage in self.values() if stage.runs]

    def above(self, stage: StagePlan) -> StagePlan:
        """The stage that feeds its first input."""
        return self[stage.upstream[0].stage]

    def readers(self, name: str) -> list[StagePlan]:
        """The running stages that read from a stage."""
        return [stage for stage in self.running() if any(edge.stage == name for edge in stage.upstream)]

    def sole_reader(self, stage: StagePlan) -> StagePlan | None:
        """The one stage that reads from this one; None if others do, or the loader."""
        readers = [] if self.shortcut(self.output).stage == stage.name else self.readers(stage.name)
        return readers[0] if len(readers) == 1 else None

    def shortcut(self, edge: Edge) -> Edge:
        """The edge that carries the chunks once stages that were left out are passed over."""
        while not self[edge.stage].runs:
            edge = self[edge.stage].upstream[0]
        return edge

    def leave_out(self, name: str, why: str, within: str | None = None) -> None:
        """The stage does not run; the stages below it read from the stage above it."""
        self.change(name, left_out=why, within=within)
        for other in self.readers(name):
            self.change(other.name, upstream=tuple(map(self.shortcut, other.upstream)))
