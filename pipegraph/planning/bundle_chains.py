"""Where rows travel in bundles: which chains of stages take them, decided from the plan alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipegraph.contracts import Operator, Regroup, Source
from pipegraph.graph import Edge
from pipegraph.planning.plan import StagePlan

ROWS_PER_WORKER = 1024
"""Default capacity of a queue of rows that will be a batch, if they are light (``channel.LIGHT_BYTES``)."""


def bundle_rows(planned: dict[str, StagePlan], output: Edge) -> None:
    """Mark the chains source -> one-to-one stages -> ``Batch`` whose rows may travel together."""
    for batch in list(planned.values()):
        operator = batch.operator
        if not isinstance(operator, Regroup) or not operator.bundles or batch.spec.on_error != "raise":
            continue
        if not _plain(batch) or batch.backend != "thread":
            continue
        chain = _chain_above(batch, planned, output)
        if not chain:
            continue
        size = operator.group_size()
        capacities = {
            stage.name: max(stage.capacity, min(size, ROWS_PER_WORKER) * stage.workers)
            if stage.spec.capacity is None
            else stage.capacity
            for stage in chain
        }
        # Every worker's bundle has its place in the queue: none waits with it for another's.
        most = min(capacities[stage.name] // stage.workers for stage in chain)
        first = chain[0].operator
        if most >= 2 * size and len(chain) == 1 and isinstance(first, Source) and first.never_waits:
            most -= most % size
        else:
            most = min(size, most)
        if most < 2:
            continue
        for stage in chain:
            planned[stage.name] = replace(
                stage, capacity=capacities[stage.name], bundle=batch.name, most_rows=most
            )
        source = planned[chain[0].name]
        note = f"hands up to {most} rows at a time on to {batch.name!r}, where they are quick"
        planned[source.name] = replace(source, notes=(*source.notes, note))
        planned[batch.name] = replace(batch, bundle=batch.name)


def _plain(stage: StagePlan) -> bool:
    return stage.bypassed is None and stage.backend in ("thread", "process") and not stage.unordered_above


def _chain_above(batch: StagePlan, planned: Mapping[str, StagePlan], output: Edge) -> list[StagePlan]:
    """The stages from the source to the one before ``batch``; none if one of them must have row by row."""
    chain: list[StagePlan] = []
    below = batch
    while len(below.upstream) == 1:
        edge = below.upstream[0]
        stage = planned[edge.stage]
        readers = [s for s in planned.values() if s.bypassed is None and edge in s.upstream]
        if len(readers) != 1 or output.stage == stage.name or not _plain(stage) or not stage.operator.bundles:
            return []
        chain.insert(0, stage)
        if isinstance(stage.operator, Source):
            return chain
        assert isinstance(stage.operator, Operator)
        if stage.operator.kind != "map":
            return []
        below = stage
    return []
