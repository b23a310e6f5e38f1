"""``pipegraph plan``: the plan of a graph, with the decoder that this machine's measurement chooses."""

from __future__ import annotations

from contextlib import suppress

from pipegraph.errors import MissingExtraError
from pipegraph.graph import Graph
from pipegraph.operators import DecodeImage
from pipegraph.operators.images import open_backend


def run_plan(graph: Graph, output: str | None) -> None:
    """Print the plan."""
    plan = graph.plan(output)
    operators = [stage.operator for stage in plan.running]
    if any(isinstance(each, DecodeImage) and each.backend == "auto" for each in operators):
        # A plan measures nothing, and says what has been measured.
        with suppress(MissingExtraError):
            open_backend("auto")
            plan = graph.plan(output)
    print(plan)
