"""The worker loops of fan-ins and routes; ``loops`` says what all loops have in common."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from operator import index as as_int
from time import perf_counter_ns
from typing import Any

import numpy as np

from pipegraph.chunk import Chunk, EndOfEpoch, Failure, Mark
from pipegraph.contracts import FanIn, FanOut
from pipegraph.engine.stage.cursors import freeze
from pipegraph.engine.stage.restore import ways_in
from pipegraph.engine.stage.row_intake import RowIntake
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage.turns import MergeCheck, RouteCheck
from pipegraph.engine.stage_worker import Worker
from pipegraph.errors import shown

Loop = Iterator[None]


def route_loop(stage: StageRun, worker: Worker) -> Loop:
    """Send each chunk to one output. If a Merge follows, send a Mark where the stream switches outputs."""
    operator: FanOut = worker.operator
    get = RowIntake(stage.inboxes[0], stage.run.account).get
    puts = [partial(sender.send, 0) for sender in stage.senders]
    tokens = [partial(sender.token, 0) for sender in stage.senders]
    joined = stage.plan.route_outputs  # the outputs that a Merge joins; it starts with the lowest of them
    choose = stage.failures.guard(worker, stage.failures.seeded(operator.choose))
    check = RouteCheck(stage.plan, operator, stage.failures.seeded).check
    meter, now = worker.meter, perf_counter_ns
    # With a Merge below, a cursor is (input cursor, output): a restart must switch where this run did.
    turn = first = min(joined, default=0)
    if stage.restart.cursor is not None:
        turn = stage.restart.cursor
    while True:
        item = get()
        if item.__class__ is Chunk:
            stage.number(worker, item)
            start = now()
            failed: Any = None
            try:
                output = _number(choose(item))
                if not 0 <= output < len(puts):
                    raise IndexError(f"choose returned output {output}, there are {len(puts)}")
            except BaseException as error:
                failed, output = stage.failures.handle(worker, item, error), -1
            else:
                wrong = check(item, output)
                if wrong is not None:
                    failed, output = Failure(wrong, item.epoch), -1
            meter.busy_ns += now() - start
            meter.calls += 1
            if output < 0:
                stage.drop(0, item.buffers)
                if failed is not None:
                    for put in puts:  # to all, because any of them may be read first
                        put(failed)
                yield
                continue
            meter.items += 1
            meter.samples += len(item.lineages)
            if joined:
                before, after = item.before, item.after
                item.before = (before, turn)
                if output != turn and output in joined:
                    left, turn = turn, int(output)
                    puts[left](Mark(stage.name, turn, item.epoch, item.before, (after, turn)))
                item.after = (after, turn)
            if not puts[output](item):
                meter.dropped += 1
        elif isinstance(item, EndOfEpoch):
            turn = first
            for token in tokens:
                token(item)
        elif isinstance(item, Mark):
            mark = item
            if joined:
                mark = Mark(item.route, item.turn, item.epoch, (item.before, turn), (item.after, turn))
            puts[turn](mark)
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


def merge_loop(stage: StageRun, worker: Worker) -> Loop:
    """Read several inputs in the order that the operator's state decides."""
    operator: FanIn = worker.operator
    account, put = stage.run.account, partial(stage.sender.send, 0)
    inboxes = [RowIntake(channel, account) for channel in stage.inboxes]
    count = len(inboxes)
    plan = stage.run.plan
    tracked = plan.stages[plan.output.stage].unordered_above  # samples are identified by lineage and path
    ways = ways_in(plan, stage.plan)
    epoch = stage.run.first_epoch
    process = stage.failures.seeded(operator.process)

    def cursor_at(positions: list[Any]) -> Any:
        return operator.cursor(positions) if operator.consecutive else freeze(operator.cursor(positions))

    if stage.plan.route is not None:
        operator.follow(stage.plan.route, stage.plan.route_outputs)
    while True:
        check = None if operator.consecutive else MergeCheck(stage.plan, operator, epoch)
        operator.begin(count, epoch)
        positions: list[Any] = [None] * count
        if epoch == stage.run.first_epoch and stage.restart.cursor is not None:
            positions = list(operator.cursors(stage.restart.cursor, count))
        last = cursor_at(positions)
        ended: set[int] = set()
        held: list[Any] = []
        index = operator.next_input()
        while index is not None:
            item, out = inboxes[index].get(), None
            if item.__class__ is Chunk:
                if tracked:
                    item.paths = tuple(
                        (*path, ways[index]) for path in item.paths or ((),) * len(item.lineages)
                    )
                if check is not None:
                    check.came(item)
                positions[index] = item.after
                if item.buffers:
                    held.append(item.buffers)
                out = stage.attempt(worker, item, process)
                if out.__class__ is Chunk:
                    after = cursor_at(positions)
                    out.before, out.after, last = last, after, after
            elif isinstance(item, EndOfEpoch):
                ended.add(index)
                operator.end_input(index)
            elif not isinstance(item, Mark):
                put(item)
            elif operator.turn(item):
                positions[index] = item.after
            elif stage.plan.marked:  # a mark of an enclosing route, in its place in the stream
                positions[index] = item.after
                after = cursor_at(positions)
                put(Mark(item.route, item.turn, item.epoch, last, after))
                last = after
            index = operator.next_input()
            if check is not None and isinstance(item, EndOfEpoch):
                wrong = check.ends(operator, positions, ended, index)
                if wrong is not None:
                    put(Failure(wrong, epoch))
            if out is not None:
                if check is not None and out.__class__ is Chunk:
                    wrong = check.check(operator, out, positions, ended, index)
                    out = out if wrong is None else Failure(wrong, out.epoch)
                stage.leave(worker, 0, out, tuple(chain.from_iterable(held)), 0)
                held.clear()
            yield
        for buffers in held:
            account.release(buffers)
        left = [index for index in range(count) if index not in ended]
        for index in left:
            stage.discard_input(index, epoch)
            inboxes[index].drop()
        put(EndOfEpoch(epoch))
        epoch += 1
        yield
        # Not earlier: an input may wait for an item that comes long after this epoch's end, or never.
        for index in left:
            while not isinstance(item := inboxes[index].get(), EndOfEpoch):
                account.release(item.buffers)
