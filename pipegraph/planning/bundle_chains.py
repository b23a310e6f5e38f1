"""Chooses the edges on which rows travel in bundles, and their maximum size, from the plan alone. Pure."""

from __future__ import annotations

from pipegraph.planning.draft import Draft
from pipegraph.planning.plan import StagePlan
from pipegraph.stage_spec import Edge

ROWS_PER_WORKER = 1024
"""Default capacity of a queue of rows below a source, if they are light (``contents.LIGHT_BYTES``)."""


def bundle_rows(draft: Draft) -> None:
    """Set for each stage the maximum number of rows that it hands over together."""
    for stage in draft.running():
        if _hands_over_rows(stage, draft):
            draft.change(stage.name, bundle_rows=max(1, stage.capacity // stage.workers))
    for stage in draft.running():
        for edge in stage.upstream:
            _lengthen(stage, _chain_above(edge, draft), draft)


def _hands_over_rows(stage: StagePlan, draft: Draft) -> bool:
    """Whether a stage makes rows for a single consumer, in a thread or process of its own.

    An inline stage makes one row per request, and one above a cache those that are not in it. With several consumers,
    one may wait for a row while another, whose queue is full, keeps the bundle from being sent.
    """
    if stage.cached_in is not None or stage.backend.in_consumer or stage.level not in ("sample", "part"):
        return False
    edges = [draft.shortcut(draft.output), *(edge for each in draft.running() for edge in each.upstream)]
    return [edge.stage for edge in edges].count(stage.name) == 1 and stage.kind.hands_over_rows(stage)


def _lengthen(below: StagePlan, chain: list[StagePlan], draft: Draft) -> None:
    """Lengthen the queues between a source and a stage; above a ``Batch``, bundles end where a batch ends."""
    capacities = {
        stage.name: stage.spec.capacity or max(stage.capacity, ROWS_PER_WORKER * stage.workers)
        for stage in chain
    }
    # Each worker's bundle has room in the queue: no worker waits for another's to be taken.
    rows = min((capacities[stage.name] // stage.workers for stage in chain), default=0)
    size = below.group_size() if all(stage.one_to_one for stage in chain if stage.source is None) else None
    if size is not None:
        rows -= rows % size if rows >= size else 0
    for stage in chain if rows > 1 else ():
        bundle = stage.bundle if size is None else below.name
        draft.change(stage.name, capacity=capacities[stage.name], bundle=bundle, bundle_rows=rows)


def _chain_above(edge: Edge, draft: Draft) -> list[StagePlan]:
    """The stages from a source to an edge; none if one of them does not hand over rows together."""
    chain: list[StagePlan] = []
    while True:
        stage = draft[edge.stage]
        if stage.bundle_rows == 1:
            return []
        chain.append(stage)
        if stage.source is not None:
            return chain
        if len(stage.upstream) != 1:
            return []
        edge = stage.upstream[0]
