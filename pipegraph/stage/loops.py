"""What a worker does, one generator per kind of stage; each ``yield`` ends one unit of work.

A thread worker runs its generator to the end of the run; an inline stage's is stepped by whoever
waits for its output. The loops share one shape: take an item; for a chunk, reserve memory, process,
count, send; for a token, pass it on in its place.

Cursors (see ``docs/resuming.md``): one-to-one stages leave them alone; an expanding stage wraps its
parent's as ``(parent.before, children done)``; regrouping operators set their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any

from pipegraph.activity import Cancelled
from pipegraph.chunk import Chunk, EndOfEpoch, Failure, Mark
from pipegraph.contracts import Merge, Regroup, Route, RowOperator, Source
from pipegraph.stage.rows import rows_loop
from pipegraph.stage.sources import groups_loop, reading, sequence_loop
from pipegraph.stage.stage import StageRun, Worker
from pipegraph.tree import ATOMS

Loop = Iterator[None]
Process = Callable[[Chunk], Any]


def loop_for(stage: StageRun, worker: Worker) -> Loop:
    """The loop of a stage."""
    operator = stage.plan.operator
    if isinstance(operator, Source):
        if not operator.random_access:
            return sequence_loop(stage, worker)
        if worker.operator.group > 1:
            return groups_loop(stage, worker)
        process = reading(worker.operator)
        if stage.unordered:
            return _map_unordered(stage, worker, process)
        return (_map_pooled if stage.pooled else _map_alone)(stage, worker, process)
    if hasattr(operator, "state_dict") and operator.kind in ("map", "expand", "regroup"):
        from pipegraph.stage.stateful import stateful_loop

        return stateful_loop(stage, worker)
    if isinstance(operator, RowOperator):
        return rows_loop(stage, worker)
    if operator.kind == "map":
        process = worker.operator.process
        if stage.unordered:
            return _map_unordered(stage, worker, process)
        return (_map_pooled if stage.pooled else _map_alone)(stage, worker, process)
    if operator.kind == "expand":
        return _expand(stage, worker)
    if operator.kind == "regroup":
        return _regroup(stage, worker)
    if operator.kind == "merge":
        return _merge(stage, worker)
    return _route(stage, worker)


def _map_alone(stage: StageRun, worker: Worker, process: Process) -> Loop:
    """One worker, in order: the shortest path, and the one most stages take."""
    get, put = stage.inboxes[0].get, stage.putter()
    process = stage.failures.guard(worker, process)
    meter, memory, reserve, now = worker.meter, stage.account, stage.run.account.reserve, perf_counter_ns
    while True:
        item = get()
        if item.__class__ is Chunk:
            held = item.buffers
            reserved = reserve(memory) if memory.largest else 0
            start = now()
            try:
                out = process(item)
            except Exception as error:
                out = stage.failures.handle(worker, item, error)
            meter.busy_ns += now() - start
            meter.calls += 1
            if out is None:
                meter.dropped += 1
                stage.drop(reserved, held)
            else:
                meter.items += 1
                meter.samples += len(item.rows)
                if held or reserved or out.__class__ is not Chunk or out.data.__class__ not in ATOMS:
                    stage.settle(worker, reserved, held, out)
                if not put(out):
                    stage.unwanted(out)
        else:
            put(item)
        yield


def _map_pooled(stage: StageRun, worker: Worker, process: Process) -> Loop:
    """Several workers, in order: outputs are put in the lane of their input's ticket."""
    take, put_at = stage.inboxes[0].take, stage.lane_putter()
    process = stage.failures.guard(worker, process)
    meter, memory, reserve, now = worker.meter, stage.account, stage.run.account.reserve, perf_counter_ns
    while True:
        ticket, item = take()
        worker.ticket = ticket
        if item.__class__ is Chunk:
            held = item.buffers
            reserved = reserve(memory) if memory.largest else 0
            start = now()
            try:
                out = process(item)
            except Exception as error:
                out = stage.failures.handle(worker, item, error)
            meter.busy_ns += now() - start
            meter.calls += 1
            stage.forget(ticket)
            if out is None:
                meter.dropped += 1
                stage.drop(reserved, held)
                stage.close_lane(ticket)
            else:
                meter.items += 1
                meter.samples += len(item.rows)
                if held or reserved or out.__class__ is not Chunk or out.data.__class__ not in ATOMS:
                    stage.settle(worker, reserved, held, out)
                if not put_at(ticket, out, True):
                    stage.unwanted(out)
        else:
            put_at(ticket, item, True)
        yield


def _map_unordered(stage: StageRun, worker: Worker, process: Process) -> Loop:
    """Several workers, as they finish."""
    take = stage.inboxes[0].take
    process = stage.failures.guard(worker, process)
    meter, memory, reserve, now = worker.meter, stage.account, stage.run.account.reserve, perf_counter_ns
    while True:
        ticket, item = take()
        worker.ticket = ticket
        if item.__class__ is Chunk:
            held = item.buffers
            reserved = reserve(memory) if memory.largest else 0
            start = now()
            try:
                out = process(item)
            except Exception as error:
                out = stage.failures.handle(worker, item, error)
            meter.busy_ns += now() - start
            meter.calls += 1
            stage.forget(ticket)
            if out is None:
                meter.dropped += 1
                stage.drop(reserved, held)
            else:
                meter.items += 1
                meter.samples += len(item.rows)
                stage.settle(worker, reserved, held, out)
                if not stage.put_unordered(ticket, out, True):
                    stage.unwanted(out)
            stage.finish_ticket(ticket)
        else:
            _unordered_token(stage, item)
        yield


def _unordered_token(stage: StageRun, item: Any) -> None:
    if isinstance(item, EndOfEpoch):
        stage.end_epoch(item)
    elif isinstance(item, Failure):
        stage.run.fail(item.error)  # a failure has no place below a completion-order stage
        raise Cancelled


def _expand(stage: StageRun, worker: Worker) -> Loop:
    """One chunk in, any number out, alone or pooled, ordered or not."""
    pooled, unordered = stage.pooled, stage.unordered
    inbox = stage.inboxes[0]
    put, put_at = stage.putter(), stage.lane_putter()
    nested = not stage.plan.unordered_above
    process = stage.failures.guard(worker, worker.operator.process)
    meter, memory, reserve, now = worker.meter, stage.account, stage.run.account.reserve, perf_counter_ns
    while True:
        if pooled:
            ticket, item = inbox.take()
            worker.ticket = ticket
        else:
            ticket, item = 0, inbox.get()
        if item.__class__ is not Chunk:
            if isinstance(item, Mark) and nested:
                item = Mark(item.route, item.turn, item.epoch, (item.before, 0), (item.after, 0))
            if unordered:
                _unordered_token(stage, item)
            elif pooled:
                put_at(ticket, item, True)
            else:
                put(item)
            yield
            continue
        skip = _children_to_drop(stage, item)
        parent, held, before = item, item.buffers, item.before
        children = None
        index = 0
        while True:
            # A child may be a view of its parent, or the parent be read on: it is held to the last.
            reserved = reserve(memory) if memory.largest else 0
            start = now()
            child: Any
            try:
                if children is None:
                    children = iter(process(parent))
                child = next(children, None)
            except Exception as error:
                child = stage.failures.handle(worker, parent, error)
                children = iter(())
            meter.busy_ns += now() - start
            if child is None:
                stage.drop(reserved, ())
                break
            index += 1
            if child.__class__ is Chunk:
                if index <= skip:
                    stage.drop(reserved, ())
                    continue
                if nested:
                    child.before, child.after = (before, index - 1), (before, index)
                else:
                    child.before, child.after = before, before
                meter.items += 1
                meter.samples += len(child.rows)
            stage.settle(worker, reserved, (), child)
            if unordered:
                kept = stage.put_unordered(ticket, child, False)
            else:
                kept = put_at(ticket, child, False) if pooled else put(child)
            if not kept:
                stage.unwanted(child)
                if stage.stop_epoch >= item.epoch:
                    break
            if not pooled:
                yield
        del children
        meter.calls += 1
        stage.drop(0, held)
        if unordered:
            stage.finish_ticket(ticket)
        elif pooled:
            stage.close_lane(ticket)
        yield


def _children_to_drop(stage: StageRun, parent: Chunk) -> int:
    drop = stage.restart.drop
    if drop is not None and parent.epoch == stage.run.first_epoch and parent.before == drop[0]:
        return drop[1]
    return 0


def _regroup(stage: StageRun, worker: Worker) -> Loop:
    """Chunks in, other chunks out. Marks wait until the open group has left."""
    get, put = stage.inboxes[0].get, stage.putter()
    operator: Regroup = worker.operator
    process = operator.process
    operator.begin()
    if stage.restart.cursor is not None:
        operator.resume(stage.restart.cursor)
    meter, memory, reserve, now = worker.meter, stage.account, stage.run.account.reserve, perf_counter_ns
    account = stage.run.account
    open_rows: dict[Any, Any] = {}
    marks: list[Mark] = []

    def send(made: Any) -> None:
        for out in made:
            meter.items += 1
            meter.samples += len(out.rows)
            stage.settle(worker, 0, (), out)
            if open_rows:
                for row in out.rows:
                    account.release(open_rows.pop(row, ()))
            if not put(out):
                stage.unwanted(out)

    while True:
        item = get()
        if item.__class__ is Chunk:
            reserved = reserve(memory) if memory.largest else 0
            if item.buffers:
                open_rows[item.rows[0]] = item.buffers
            start = now()
            try:
                made = list(process(item))
            except Exception as error:
                made = []
                failure = stage.failures.handle(worker, item, error)
                if failure is not None:
                    put(failure)
            meter.busy_ns += now() - start
            meter.calls += 1
            account.cancel_reservation(reserved)
            if made:
                send(made)
                for mark in marks:
                    put(mark)
                marks.clear()
        elif isinstance(item, EndOfEpoch):
            try:
                made = list(operator.flush())
            except Exception as error:
                made = []
                error.add_note(f"pipegraph: stage {stage.name!r}, at the end of epoch {item.epoch}")
                put(Failure(error, item.epoch))
            send(made)
            for buffers in open_rows.values():
                account.release(buffers)
            open_rows.clear()
            for mark in marks:
                put(mark)
            marks.clear()
            put(item)
        elif isinstance(item, Mark):
            marks.append(item)
        else:
            put(item)
        yield


def _route(stage: StageRun, worker: Worker) -> Loop:
    """Each chunk to one output; where a Merge follows, a Mark says that the stream turns."""
    operator: Route = worker.operator
    get = stage.inboxes[0].get
    puts = [stage.putter(output) for output in range(operator.outputs)]
    joined = stage.plan.route_outputs  # a Merge follows these; it starts with the lowest of them
    meter, now = worker.meter, perf_counter_ns
    turn = first = min(joined, default=0)
    while True:
        item = get()
        if item.__class__ is Chunk:
            start = now()
            try:
                output = operator.choose(item)
                if output.__class__ is not int and not hasattr(output, "__index__"):
                    raise TypeError(f"choose must return an output number, got {output!r}")
                if not 0 <= output < len(puts):
                    raise IndexError(f"choose returned output {output}, there are {len(puts)}")
            except Exception as error:
                failed = stage.failures.handle(worker, item, error)
                meter.busy_ns += now() - start
                stage.drop(0, item.buffers)
                if failed is not None:
                    puts[turn](failed)
                yield
                continue
            meter.busy_ns += now() - start
            meter.calls += 1
            meter.items += 1
            meter.samples += len(item.rows)
            if output != turn and output in joined:
                puts[turn](Mark(stage.name, output, item.epoch, item.before, item.after))
                turn = output
            if not puts[output](item):
                worker.meter.dropped += 1
                stage.unwanted(item)
        elif isinstance(item, EndOfEpoch):
            turn = first
            for put in puts:
                put(item)
        elif isinstance(item, Mark):
            puts[turn](item)
        else:
            puts[turn](item)
        yield


def _merge(stage: StageRun, worker: Worker) -> Loop:
    """Several inputs, read in the order that the operator's own state decides."""
    operator: Merge = worker.operator
    inboxes, put = stage.inboxes, stage.putter()
    count = len(inboxes)
    tracked = stage.plan.unordered_above
    epoch = stage.run.first_epoch
    if stage.plan.route is not None:
        operator.follow(stage.plan.route, stage.plan.route_outputs)
    while True:
        operator.begin(count, epoch)
        positions: list[Any] = [None] * count
        if epoch == stage.run.first_epoch and stage.restart.cursor is not None:
            positions = list(operator.cursors(stage.restart.cursor, count))
        last = operator.cursor(positions)
        ended: set[int] = set()
        held: list[Any] = []
        while (index := operator.next_input()) is not None:
            item = inboxes[index].get()
            if item.__class__ is Chunk:
                if tracked:
                    item.paths = tuple((*path, index) for path in item.paths or ((),) * len(item.rows))
                positions[index] = item.after
                last = _merge_one(stage, worker, item, positions, last, held, put)
            elif isinstance(item, EndOfEpoch):
                ended.add(index)
                operator.end_input(index)
            elif isinstance(item, Mark):
                if operator.turn(item):
                    positions[index] = item.after
                else:
                    put(item)
            else:
                put(item)
            yield
        for buffers in held:
            stage.run.account.release(buffers)
        for index in range(count):
            if index not in ended:
                for chunk in inboxes[index].discard(epoch):
                    stage.run.account.release(chunk.buffers)
                while True:
                    item = inboxes[index].get()
                    if isinstance(item, EndOfEpoch):
                        break
                    stage.run.account.release(item.buffers)
        put(EndOfEpoch(epoch))
        epoch += 1
        yield


def _merge_one(
    stage: StageRun,
    worker: Worker,
    item: Chunk,
    positions: list[Any],
    last: Any,
    held: list[Any],
    put: Callable[[Any], bool],
) -> Any:
    """Process one chunk of a fan-in; returns the cursor after what was sent last."""
    meter = worker.meter
    if item.buffers:
        held.append(item.buffers)
    start = perf_counter_ns()
    try:
        out = worker.operator.process(item)
    except Exception as error:
        out = stage.failures.handle(worker, item, error)
    meter.busy_ns += perf_counter_ns() - start
    meter.calls += 1
    if out is None:
        return last
    if out.__class__ is Chunk:
        after = worker.operator.cursor(positions)
        out.before, out.after, last = last, after, after
        meter.items += 1
        meter.samples += len(out.rows)
    stage.settle(worker, 0, (), out)
    for buffers in held:
        stage.run.account.release(buffers)
    held.clear()
    if not put(out):
        stage.unwanted(out)
    return last
