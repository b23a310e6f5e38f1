"""One-to-one stages and filters, for samples and batches: each item leaves in its place, with its cursors.

A worker takes a chunk, or a bundle of rows. Operators with ``BundleMap`` do its rows one after the other in one call;
all others get each row as a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from pipegraph.contracts import Operator, Source
from pipegraph.engine.stage.parallel import ByBundle, parallel
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Loop, Worker
from pipegraph.planning.kind import Reached, StageKind
from pipegraph.planning.plan import StagePlan


class MapKind(StageKind):
    """See the module docstring."""

    parallel = True
    in_place = True
    by_sample = True

    def one_to_one(self, operator: Operator | Source) -> bool:
        return cast(Operator, operator).one_to_one

    def hands_over_rows(self, stage: StagePlan) -> bool:
        return stage.traits.blocks

    def reached(
        self, stage: StagePlan, at: Reached, draw: tuple[int, int], drops: bool
    ) -> Sequence[Reached] | None:
        return super().reached(stage, at, draw, drops or not stage.work.one_to_one)

    def loop(self, stage: StageRun, worker: Worker) -> Loop:
        operator = worker.operator
        do = operator.do if stage.plan.remote else ByBundle(stage, worker, operator.process).do
        return parallel(stage, worker, do, stage.pace.rows, stage.plan.traits.blocks)
