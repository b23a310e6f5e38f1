"""Routes: one input, several outputs; the operator chooses one for each item."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index as as_int

import numpy as np

from pipegraph.bundle import DROPPED
from pipegraph.chunk import Chunk
from pipegraph.engine.stage.failure_policy import Outcome, outcome_of
from pipegraph.engine.stage.serial import Serial, serial, to_all
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Loop, Worker
from pipegraph.planning.kind import StageKind
from pipegraph.planning.plan import StagePlan


class RouteKind(StageKind):
    """See the module docstring."""

    hands_on = True
    sends_in_turn = True
    stateless = (
        "a route has no state: choose() must be a pure function of its chunk; let an operator with a state above "
        "it write into the sample which output it is for"
    )
    by_sample = True

    def elastic(self, stage: StagePlan) -> bool:
        return False

    def why_unknown(self, operator: object) -> str | None:
        return "it depends on what comes beside each item"

    def loop(self, stage: StageRun, worker: Worker) -> Loop:
        return serial(_Routing(stage, worker))


class _Routing(Serial):
    """Sends each chunk to one output, and its failure to all."""

    def __init__(self, stage: StageRun, worker: Worker) -> None:
        super().__init__(stage, worker)
        self._choose = stage.failures.seeded(self.operator.choose)

    def take(self, item: Chunk) -> Iterable[None]:
        stage, meter = self.stage, self.worker.meter
        (output,) = stage.failures.do_all(self.worker, item, self._do)
        if output.__class__ is int:
            meter.items += 1
            meter.samples += len(item.lineages)
            if not stage.senders[output].send(0, item):
                meter.dropped += 1
        else:
            self.account.release(item.buffers)
            if output is not DROPPED:
                to_all(stage, output)
        return ()

    def _do(self, chunk: Chunk, at: int) -> Outcome:
        return outcome_of(self._chosen, chunk)

    def _chosen(self, chunk: Chunk) -> int:
        chosen, outputs = self._choose(chunk), len(self.stage.senders)
        output = int(chosen) if isinstance(chosen, np.bool_) else as_int(chosen)
        if not 0 <= output < outputs:
            raise IndexError(f"choose returned output {output}, there are {outputs}")
        return output
