"""The loop of operators that keep state of their own: one worker, in order, with snapshots.

Every ``SNAPSHOT_EVERY`` inputs the operator's ``state_dict()`` is taken; of a regrouping operator, which may hold
samples beside its state, as soon then as all that came in have left. The cursor of an output is
``(n, base, snapshot, drop)``: its number in the epoch, the input cursor and the snapshot to restart
from, and how many outputs to drop after that (marks are outputs too). The snapshot is wrapped in a dict, which
cursors leave as it is. The state begins anew in each epoch, so that an epoch
never depends on which came before (promise 3).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter_ns
from typing import Any

from pipegraph.chunk import Chunk, EndOfEpoch, Failure, Mark
from pipegraph.contracts import Regroup
from pipegraph.errors import note
from pipegraph.stage.stage import StageRun, Worker, number_item

SNAPSHOT_EVERY = 64


def stateful_loop(stage: StageRun, worker: Worker) -> Iterator[None]:
    """See the module docstring."""
    get, put = stage.inboxes[0].get, stage.putter()
    operator, meter = worker.operator, worker.meter
    account = stage.run.account
    initial = copy.deepcopy(operator.state_dict()) if worker.initial is None else worker.initial
    worker.initial = initial
    operator.load_state_dict(copy.deepcopy(initial))
    regroups = isinstance(operator, Regroup)
    if regroups:
        operator.begin()
    number, base, drop = 0, None, 0
    snapshot: dict[str, Any] | None = None
    if stage.restart.cursor is not None:
        number, base, snapshot, drop = stage.restart.cursor
        if snapshot is not None:
            operator.load_state_dict(copy.deepcopy(snapshot["state"]))
        number -= drop
    done, inputs = 0, 0
    held: list[Any] = []
    inside: Counter[Any] = Counter()  # samples that a regrouping operator may hold

    def cursors() -> tuple[Any, Any] | None:
        """Of the next output; None if it left before the restart."""
        nonlocal number, done
        number += 1
        done += 1
        if done <= drop:
            return None
        return (number - 1, base, snapshot, done - 1), (number, base, snapshot, done)

    def send(made: list[Any]) -> Iterator[None]:
        for out in made:
            if isinstance(out, Chunk):
                if regroups:
                    inside.subtract(out.rows)
                places = cursors()
                if places is None:
                    continue
                out.before, out.after = places
                meter.items += 1
                meter.samples += len(out.rows)
            stage.settle(worker, 0, (), out)
            if not put(out):
                stage.unwanted(out)
            yield

    def work(item: Chunk | None, call: Callable[[], Any], epoch: int) -> list[Any]:
        start = perf_counter_ns()
        try:
            made = call()
            made = [made] if isinstance(made, Chunk) else [] if made is None else list(made)
        except BaseException as error:
            if item is not None:
                failure: Any = stage.failures.handle(worker, item, error)
            elif isinstance(error, Exception):
                note(error, f"pipegraph: stage {stage.name!r}, at the end of epoch {epoch}")
                failure = Failure(error, epoch)
            else:
                raise
            made = [] if failure is None else [failure]
        meter.busy_ns += perf_counter_ns() - start
        meter.calls += 1
        return made

    def release() -> None:
        for buffers in held:
            account.release(buffers)
        held.clear()

    while True:
        item = get()
        if isinstance(item, Chunk):
            number_item(stage, worker, item)
            after = item.after
            if item.buffers:
                held.append(item.buffers)
            if regroups:
                inside.update(item.rows)
            made = work(item, partial(operator.process, item), item.epoch)
            yield from send(made)
            inputs += 1
            if not regroups or made:
                release()
            if inputs >= SNAPSHOT_EVERY and not (regroups and any(inside.values())):
                inputs = 0
                inside.clear()
                base, snapshot = after, {"state": copy.deepcopy(operator.state_dict())}
                drop, done = max(0, drop - done), 0
        elif isinstance(item, EndOfEpoch):
            if regroups:
                yield from send(work(None, operator.flush, item.epoch))
            release()
            put(item)
            operator.load_state_dict(copy.deepcopy(initial))
            inside.clear()
            number, base, snapshot, drop, done, inputs = 0, None, None, 0, 0, 0
        elif isinstance(item, Mark):
            places = cursors()
            if places is not None:
                put(Mark(item.route, item.turn, item.epoch, *places))
        else:
            put(item)
        yield
