"""A graph as text, as a table for notebooks and for networkx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipegraph.html import html_table
from pipegraph.stage_spec import StageSpec

if TYPE_CHECKING:
    import networkx

Stages = Mapping[str, StageSpec]


def digraph(name: str, stages: Stages) -> networkx.DiGraph[str]:
    """See :meth:`Graph.to_networkx`."""
    import networkx

    found: networkx.DiGraph[str] = networkx.DiGraph(name=name)
    for stage, spec in stages.items():
        found.add_node(stage, spec=spec)
    for stage, spec in stages.items():
        for index, edge in enumerate(spec.upstream):
            found.add_edge(edge.stage, stage, output=edge.output, input=index)
    return found


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
