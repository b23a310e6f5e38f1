"""The loop of each kind of stage: a generator, each ``yield`` of which ends one unit of work.

One that gives ``HALFWAY`` is in the middle of a unit.

A thread worker runs its generator to the end of the run; an inline stage's is stepped by whoever
waits for its output. The loops share one shape: take an item; for a chunk, or for each row of a bundle, reserve
memory, process, count, send; for a token, pass it on in its place.

Cursors (see ``docs/resuming.md``): one-to-one stages leave them alone; all others set their own.
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
    """The loop of a stage."""
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
