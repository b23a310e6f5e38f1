"""Picks the worker loop of a stage: a generator in which each ``yield`` ends one unit of work.

A loop that yields ``HALFWAY`` is in the middle of a unit.

A worker's thread runs its loop until the run ends; the loop of an inline stage is stepped by the threads that wait for
its output. All loops have one form: take an item; for a chunk, or each row of a bundle, reserve memory, process, count
and send; pass a token on in its place.

One-to-one stages leave cursors (see ``docs/resuming.md``) alone; all others set their own.
"""

from __future__ import annotations

from pipegraph.contracts import RowOperator, Source
from pipegraph.engine.stage.expand_loop import Loop, expand_loop
from pipegraph.engine.stage.map_loop import map_loop
from pipegraph.engine.stage.merge_route import merge_loop, route_loop
from pipegraph.engine.stage.regroup_loop import regroup_loop
from pipegraph.engine.stage.row_parallel import rows_loop
from pipegraph.engine.stage.sidecar_loop import sidecar_loop
from pipegraph.engine.stage.source_loops import sequence_loop
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage.stateful_loop import stateful_loop
from pipegraph.engine.stage_worker import Worker
from pipegraph.planning.isolation import Elsewhere

_BY_KIND = {
    "map": map_loop,
    "expand": expand_loop,
    "regroup": regroup_loop,
    "merge": merge_loop,
    "route": route_loop,
}


def loop_for(stage: StageRun, worker: Worker) -> Loop:
    """The worker loop of a stage."""
    operator = stage.plan.operator
    if isinstance(operator, Elsewhere):
        return sidecar_loop(stage, worker)
    if isinstance(operator, Source):
        return (map_loop if operator.random_access else sequence_loop)(stage, worker)
    if operator.stateful:
        return stateful_loop(stage, worker)
    if isinstance(operator, RowOperator) and not stage.plan.remote:
        return rows_loop(stage, worker)
    return _BY_KIND[operator.kind](stage, worker)
