"""``pipegraph quality``: how well the order of a graph's source shuffles."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipegraph.errors import GraphError
from pipegraph.graph import Graph
from pipegraph.operators import Batch
from pipegraph.operators.ordered import OrderedSource
from pipegraph.order import total_samples
from pipegraph.order.quality import quality
from pipegraph.storage import Manifest

SAMPLES_PER_PART = 1000
"""Data without shards is taken to lie in runs of this many neighbours."""


def run_quality(graph: Graph, classes: int) -> None:
    """Print the measures of the graph's first epoch, beside those of a global shuffle."""
    plan = graph.plan()
    sources = [stage for stage in plan.running if isinstance(stage.operator, OrderedSource)]
    if len(sources) != 1:
        names = ", ".join(repr(stage.name) for stage in sources) or "none"
        raise GraphError(
            f"graph {graph.name!r}: one source with an order is needed (ShardSelect, ListFiles, FromSequence), "
            f"found {names}"
        )
    source: Any = sources[0].operator
    if not source.random_access:
        raise GraphError(
            f"stage {sources[0].name!r}: the order of whole parts is known only while they are read; "
            "give ShardSelect a manifest= or another order"
        )
    layout = source.layout()
    total = total_samples(layout)
    batch = next(
        (stage.operator.size for stage in plan.running if isinstance(stage.operator, Batch)), None
    ) or min(256, total)
    if isinstance(layout, Manifest):
        parts = np.asarray(layout.part_samples)
    else:
        parts = np.full(-(-total // SAMPLES_PER_PART), SAMPLES_PER_PART, np.int64)
        parts[-1] = total - SAMPLES_PER_PART * (len(parts) - 1)
    seed = graph.seed or 0

    def epoch(number: int) -> Any:
        length = source.order.length(layout, 1, (), 0, seed, number)
        return source.order.indices(layout, seed, number, 0, 1, 0, length)

    print(f"order of stage {sources[0].name!r}: {total:,} samples, batches of {batch}, {len(parts):,} parts")
    print(quality(epoch(0), np.asarray(parts, np.int64), batch, classes, epoch(1)))
