"""A graph as text, as a table for notebooks, in Graphviz' language and for networkx."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegraph.contracts import FanOut
from pipegraph.html import html_table

if TYPE_CHECKING:
    import networkx

    from pipegraph.graph import Graph
    from pipegraph.stage_spec import Edge


def digraph(graph: Graph) -> networkx.DiGraph[str]:
    """See :meth:`Graph.to_networkx`."""
    import networkx

    found: networkx.DiGraph[str] = networkx.DiGraph(name=graph.name)
    for name, spec in graph.stages.items():
        found.add_node(name, spec=spec)
    for name, spec in graph.stages.items():
        for index, edge in enumerate(spec.upstream):
            found.add_edge(edge.stage, name, output=edge.output, input=index)
    return found


def dot(graph: Graph) -> str:
    """See :meth:`Graph.to_dot`."""

    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    lines = [f"digraph {quoted(graph.name)} {{", "  rankdir=LR;", "  node [shape=box];"]
    for name, spec in graph.stages.items():
        lines.append(f"  {quoted(name)} [label={quoted(f'{name}: {spec.operator.name} x{spec.workers}')}];")
    for name, spec in graph.stages.items():
        for edge in spec.upstream:
            label = f" [label={quoted(str(edge.output))}]" if _is_route(graph, edge) else ""
            lines.append(f"  {quoted(edge.stage)} -> {quoted(name)}{label};")
    return "\n".join([*lines, "}"])


def table(graph: Graph) -> str:
    """The stages as HTML."""
    rows = [("stage", "operator", "workers", "backend", "from")]
    for name, spec in graph.stages.items():
        sources = ", ".join(edge.stage for edge in spec.upstream)
        rows.append((name, type(spec.operator).__name__, str(spec.workers), spec.backend, sources))
    return html_table(f"graph {graph.name!r}, seed {graph.seed}", rows)


def text(graph: Graph) -> str:
    """The stages, a line each."""
    lines = [f"graph {graph.name!r}, seed {graph.seed}, {len(graph.stages)} stages"]
    width = max((len(name) for name in graph.stages), default=0)
    for name, spec in graph.stages.items():
        sources = ", ".join(
            f"{edge.stage}[{edge.output}]" if _is_route(graph, edge) else edge.stage for edge in spec.upstream
        )
        lines.append(
            f"  {name:<{width}}  {type(spec.operator).__name__}" + (f"  <- {sources}" if sources else "")
        )
    return "\n".join(lines)


def _is_route(graph: Graph, edge: Edge) -> bool:
    return isinstance(graph.stages[edge.stage].operator, FanOut)
