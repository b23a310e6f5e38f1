"""Chooses the edges on which rows travel in bundles, and their maximum size, from the plan alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipegraph.planning.plan import StagePlan
from pipegraph.stage_spec import Edge

ROWS_PER_WORKER = 1024
"""Default capacity of a queue of rows that will become a batch, if they are light (``contents.LIGHT_BYTES``)."""


def bundle_rows(planned: dict[str, StagePlan], output: Edge) -> None:
    """Set for each stage the maximum number of rows that it hands over together."""
    for stage in list(planned.values()):
        if stage.cached_in is None and _hands_over_rows(stage, planned, output):
            planned[stage.name] = replace(stage, bundle_rows=max(1, stage.capacity // stage.workers))
    for batch in list(planned.values()):
        if batch.bypassed is None and batch.kind.collects and batch.traits.blocks:
            collecting: Any = batch.operator
            _collect_into(batch, collecting.group_size(), planned)


def _hands_over_rows(stage: StagePlan, planned: Mapping[str, StagePlan], output: Edge) -> bool:
    """Whether a stage makes rows for a single consumer, in a thread or process of its own.

    An inline stage makes one row per request. With several consumers, one may wait for a row while another, whose queue
    is full, keeps the bundle from being sent.
    """
    if stage.bypassed is not None or stage.backend.in_consumer or stage.level not in ("sample", "part"):
        return False
    edges = [edge for each in planned.values() if each.bypassed is None for edge in each.upstream]
    once = [edge.stage for edge in (*edges, output)].count(stage.name) == 1
    return once and stage.kind.hands_over_rows(stage)


def _collect_into(batch: StagePlan, size: int, planned: dict[str, StagePlan]) -> None:
    """Between a source and ``batch``: lengthen the queues, and let bundles end where a batch ends."""
    chain = _chain_above(batch, planned)
    if not chain or any(stage.cached_in is not None for stage in chain):
        return
    capacities = {
        stage.name: max(stage.capacity, ROWS_PER_WORKER * stage.workers)
        if stage.spec.capacity is None
        else stage.capacity
        for stage in chain
    }
    # Each worker's bundle has room in the queue: no worker waits for another's to be taken.
    rows = min(capacities[stage.name] // stage.workers for stage in chain)
    rows = rows - rows % size if rows >= size else rows
    if rows < 2:
        return
    for stage in chain:
        planned[stage.name] = replace(
            stage, capacity=capacities[stage.name], bundle=batch.name, bundle_rows=rows
        )
    source = planned[chain[0].name]
    note = f"hands up to {rows} rows at a time on to {batch.name!r}, where they are quick"
    planned[source.name] = replace(source, notes=(*source.notes, note))


def _chain_above(batch: StagePlan, planned: Mapping[str, StagePlan]) -> list[StagePlan]:
    """The stages from the source to the one before ``batch``; none if one of them needs its rows one by one."""
    chain: list[StagePlan] = []
    stage = batch
    while len(stage.upstream) == 1:
        stage = planned[stage.upstream[0].stage]
        if stage.bundle_rows == 1 or not stage.traits.blocks:
            return []
        chain.insert(0, stage)
        if stage.source is not None:
            return chain
        if not stage.one_to_one:
            return []
    return []
