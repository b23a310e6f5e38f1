"""A graph as text, and as a table for notebooks."""

from __future__ import annotations

from collections.abc import Mapping

from pipegraph.html import html_table
from pipegraph.stage_spec import StageSpec

Stages = Mapping[str, StageSpec]


def table(name: str, seed: int | None, stages: Stages) -> str:
    """The stages as HTML."""
    rows = [("stage", "operator", "workers", "backend", "from")]
    for stage, spec in stages.items():
        sources = ", ".join(edge.stage for edge in spec.upstream)
        rows.append((stage, type(spec.operator).__name__, str(spec.workers), spec.backend, sources))
    return html_table(f"graph {name!r}, seed {seed}", rows)


def text(name: str, seed: int | None, stages: Stages) -> str:
    """The stages, a line each."""
    lines = [f"graph {name!r}, seed {seed}, {len(stages)} stages"]
    width = max((len(stage) for stage in stages), default=0)
    for stage, spec in stages.items():
        sources = ", ".join(
            f"{edge.stage}[{edge.output}]" if stages[edge.stage].outputs else edge.stage
            for edge in spec.upstream
        )
        lines.append(
            f"  {stage:<{width}}  {type(spec.operator).__name__}" + (f"  <- {sources}" if sources else "")
        )
    return "\n".join(lines)
