"""The loop of operators that keep state of their own: one worker, in order, with snapshots.

Every ``SNAPSHOT_EVERY`` inputs the operator's ``state_dict()`` is taken. The cursor of an output is
``(n, base, snapshot, drop)``: its number in the epoch, the input cursor and the snapshot to restart
from, and how many outputs to drop after that. The state begins anew in each epoch, so that an epoch
never depends on which came before (promise 3).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any

from pipegraph.chunk import Chunk, EndOfEpoch, Failure, Mark
from pipegraph.stage.stage import StageRun, Worker

SNAPSHOT_EVERY = 64


def stateful_loop(stage: StageRun, worker: Worker) -> Iterator[None]:
    """See the module docstring."""
    get, put = stage.inboxes[0].get, stage.putter()
    operator, meter = worker.operator, worker.meter
    account = stage.run.account
    initial = copy.deepcopy(operator.state_dict()) if worker.initial is None else worker.initial
    worker.initial = initial
    operator.load_state_dict(copy.deepcopy(initial))
    number, base, snapshot, drop = 0, None, None, 0
    if stage.restart.cursor is not None:
        number, base, snapshot, drop = stage.restart.cursor
        if snapshot is not None:
            operator.load_state_dict(copy.deepcopy(snapshot))
        number -= drop
    done, inputs = 0, 0
    held: list[Any] = []

    def send(chunk: Any) -> None:
        nonlocal number, done
        number += 1
        done += 1
        if done <= drop:
            return
        chunk.before, chunk.after = (number - 1, base, snapshot, done - 1), (number, base, snapshot, done)
        meter.items += 1
        meter.samples += len(chunk.rows)
        stage.settle(worker, 0, (), chunk)
        if not put(chunk):
            stage.unwanted(chunk)

    while True:
        item = get()
        if isinstance(item, Chunk):
            start, after = perf_counter_ns(), item.after
            if item.buffers:
                held.append(item.buffers)
            try:
                made = operator.process(item)
                made = [made] if isinstance(made, Chunk) else [] if made is None else list(made)
            except Exception as error:
                made = []
                failure = stage.failures.handle(worker, item, error)
                if isinstance(failure, Failure):
                    put(failure)
                elif failure is not None:
                    made = [failure]
            meter.busy_ns += perf_counter_ns() - start
            meter.calls += 1
            for chunk in made:
                send(chunk)
            inputs += 1
            if operator.kind != "regroup" or made:
                for buffers in held:
                    account.release(buffers)
                held.clear()
            if inputs % SNAPSHOT_EVERY == 0:
                base, snapshot, drop, done = after, copy.deepcopy(operator.state_dict()), 0, 0
        elif isinstance(item, EndOfEpoch):
            if operator.kind == "regroup":
                for chunk in list(operator.flush()):
                    send(chunk)
            for buffers in held:
                account.release(buffers)
            held.clear()
            put(item)
            operator.load_state_dict(copy.deepcopy(initial))
            number, base, snapshot, drop, done, inputs = 0, None, None, 0, 0, 0
        elif isinstance(item, Mark):
            put(
                Mark(
                    item.route,
                    item.turn,
                    item.epoch,
                    (number, base, snapshot, done),
                    (number, base, snapshot, done),
                )
            )
        else:
            put(item)
        yield
