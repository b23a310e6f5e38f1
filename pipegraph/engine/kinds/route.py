"""Routes: one input, several outputs; the operator chooses one for each item."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import index as as_int
from typing import Any

import numpy as np

from pipegraph.bundle import DROPPED
from pipegraph.chunk import Chunk, EndOfEpoch
from pipegraph.contracts import FanOut
from pipegraph.engine.stage.failure_policy import Outcome, outcome_of
from pipegraph.engine.stage.row_intake import RowIntake
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Worker
from pipegraph.errors import shown
from pipegraph.planning.kind import StageKind
from pipegraph.planning.plan import StagePlan

Loop = Iterator[None]


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

    def why_unknown(self, operator: Any) -> str | None:
        return "it depends on what comes beside each item"

    def loop(self, stage: StageRun, worker: Worker) -> Loop:
        return route_loop(stage, worker)


def route_loop(stage: StageRun, worker: Worker) -> Loop:
    """Send each chunk to one output, and all else to all."""
    operator: FanOut = worker.operator
    get = RowIntake(stage.inboxes[0], stage.run.account).get
    puts = [partial(sender.send, 0) for sender in stage.senders]
    tokens = [partial(sender.token, 0) for sender in stage.senders]
    choose = stage.failures.seeded(operator.choose)

    def chosen(chunk: Chunk) -> int:
        output = _number(choose(chunk))
        if not 0 <= output < len(puts):
            raise IndexError(f"choose returned output {output}, there are {len(puts)}")
        return output

    def do(chunk: Chunk, at: int) -> Outcome:
        return outcome_of(chosen, chunk)

    meter = worker.meter
    while True:
        item = get()
        if item.__class__ is Chunk:
            stage.number(worker, item)
            (output,) = stage.failures.done(worker, item, do)
            if output.__class__ is int:
                meter.items += 1
                meter.samples += len(item.lineages)
                if not puts[output](item):
                    meter.dropped += 1
            else:
                stage.run.account.release(item.buffers)
                if output is not DROPPED:
                    for put in puts:  # to all, because any of them may be read first
                        put(output)
                output = None  # a failure's traceback may come to refer to the loader
        elif isinstance(item, EndOfEpoch):
            for token in tokens:
                token(item)
        else:
            for put in puts:
                put(item)
        yield


def _number(output: Any) -> int:
    if output.__class__ is int:
        return output
    if isinstance(output, np.bool_):
        return int(output)
    try:
        return as_int(output)
    except TypeError:  # an array has an __index__ too, and may refuse
        raise TypeError(f"choose must return an output number, got {shown(output)}") from None
