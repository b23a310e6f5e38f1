"""What runs in the sidecar, in the trainer's part of a plan: its proxy receives chunks as they are to leave."""

from __future__ import annotations

from collections.abc import Iterator

from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Worker
from pipegraph.planning.kind import StageKind


class RemoteStagesKind(StageKind):
    """The kind of a ``RemoteStages``."""

    def loop(self, stage: StageRun, worker: Worker) -> Iterator[bool]:
        loop: Iterator[bool] = worker.operator.loop(stage, worker)
        return loop
