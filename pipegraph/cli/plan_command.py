"""``pipegraph plan``: the plan of a graph, with the decoder that this machine's measurement chooses."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pipegraph.errors import MissingExtraError
from pipegraph.graph import Graph
from pipegraph.operators import DecodeImage
from pipegraph.operators.images import open_backend
from pipegraph.planning.drawing import plan_svg


def run_plan(graph: Graph, output: str | None, svg: str | None) -> None:
    """Print the plan, and write its picture to ``svg``."""
    plan = graph.plan(output)
    operators = [stage.operator for stage in plan.running]
    if any(isinstance(each, DecodeImage) and each.backend == "auto" for each in operators):
        # A plan measures nothing, and says what has been measured.
        with suppress(MissingExtraError):
            open_backend("auto")
            plan = graph.plan(output)
    print(plan)
    if svg is not None:
        Path(svg).write_text(plan_svg(plan), encoding="utf-8")
        print(f"picture: {svg}")
