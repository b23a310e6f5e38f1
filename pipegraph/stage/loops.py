"""What a worker does, one generator per kind of stage; each ``yield`` ends one unit of work.

A thread worker runs its generator to the end of the run; an inline stage's is stepped by whoever
waits for its output. The loops share one shape: take an item; for a chunk, reserve memory, process,
count, send; for a token, pass it on in its place.

Cursors (see ``docs/resuming.md``): one-to-one stages leave them alone; an expanding stage wraps its
parent's as ``(parent.before, children done)``; regrouping operators set their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from time import perf_counter_ns
from typing import Any

from pipegraph.chunk import Chunk, Cursor, EndOfEpoch, Failure, Mark
from pipegraph.contracts import Regroup, RowOperator, Source
from pipegraph.stage.cursors import earlier, same
from pipegraph.stage.failures import not_a_chunk
from pipegraph.stage.fans import merge_loop, route_loop
from pipegraph.stage.rows import rows_loop
from pipegraph.stage.sources import groups_loop, reading, sequence_loop
from pipegraph.stage.stage import StageRun, Worker, number_item
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
        return merge_loop(stage, worker)
    return route_loop(stage, worker)


def _map_alone(stage: StageRun, worker: Worker, process: Process) -> Loop:
    """One worker, in order: the shortest path, and the one most stages take."""
    get, put = stage.inboxes[0].get, stage.putter()
    process = stage.failures.guard(worker, process)
    meter, memory, reserve, now = worker.meter, stage.account, stage.run.account.reserve, perf_counter_ns
    while True:
        item = get()
        if item.__class__ is Chunk:
            held = item.buffers
            reserved = reserve(memory) if memory.guarded else 0
            start = now()
            try:
                out = process(item)
            except BaseException as error:
                out = stage.failures.handle(worker, item, error)
            meter.busy_ns += now() - start
            meter.calls += 1
            if out is None:
                meter.dropped += 1
                stage.drop(reserved, held)
            else:
                if out is not item:
                    _place_of(stage, item, out)
                if out.__class__ is Chunk:
                    meter.items += 1
                    meter.samples += len(out.rows)
                if held or reserved or out.__class__ is not Chunk or out.data.__class__ not in ATOMS:
                    stage.settle(worker, reserved, held, out)
                if not put(out):
                    stage.unwanted(out)
        else:
            put(item)
        yield


def _place_of(stage: StageRun, item: Chunk, out: Any) -> None:
    """What a one-to-one operator made takes its input's place in the stream."""
    if isinstance(out, Chunk):
        out.before, out.after, out.epoch = item.before, item.after, item.epoch
    elif not isinstance(out, Failure):
        raise not_a_chunk(out, stage.name, "process")


def _map_pooled(stage: StageRun, worker: Worker, process: Process) -> Loop:
    """Several workers, in order: outputs are put in the lane of their input's ticket."""
    take, put_at = stage.inboxes[0].take, stage.lane_putter()
    process = stage.failures.guard(worker, process)
    meter, memory, reserve, now = worker.meter, stage.account, stage.run.account.reserve, perf_counter_ns
    first = stage.first_in_line
    while True:
        ticket, item = take()
        worker.ticket = ticket
        if item.__class__ is Chunk:
            held = item.buffers
            reserved = reserve(memory, first, ticket) if memory.guarded else 0
            start = now()
            try:
                out = process(item)
            except BaseException as error:
                out = stage.failures.handle(worker, item, error)
            meter.busy_ns += now() - start
            meter.calls += 1
            stage.forget(ticket)
            if out is None:
                meter.dropped += 1
                stage.drop(reserved, held)
                stage.close_lane(ticket)
            else:
                if out is not item:
                    _place_of(stage, item, out)
                if out.__class__ is Chunk:
                    meter.items += 1
                    meter.samples += len(out.rows)
                if memory.guarded or held or out.__class__ is not Chunk or out.data.__class__ not in ATOMS:
                    stage.settle(worker, reserved, held, out)
                if not put_at(ticket, out, True):
                    stage.unwanted(out)
            if memory.guarded:
                stage.moved()
        else:
            put_at(ticket, item, True)
        yield


def _map_unordered(stage: StageRun, worker: Worker, process: Process) -> Loop:
    """Several workers, as they finish."""
    take = stage.inboxes[0].take
    process = stage.failures.guard(worker, process)
    meter, memory, reserve, now = worker.meter, stage.account, stage.run.account.reserve, perf_counter_ns
    first = stage.first_in_line
    while True:
        ticket, item = take()
        worker.ticket = ticket
        if item.__class__ is Chunk:
            held = item.buffers
            reserved = reserve(memory, first, ticket) if memory.guarded else 0
            start = now()
            try:
                out = process(item)
            except BaseException as error:
                out = stage.failures.handle(worker, item, error)
            meter.busy_ns += now() - start
            meter.calls += 1
            stage.forget(ticket)
            if out is None:
                meter.dropped += 1
                stage.drop(reserved, held)
            else:
                if out is not item:
                    _place_of(stage, item, out)
                meter.items += 1
                meter.samples += len(out.rows)
                stage.settle(worker, reserved, held, out)
                if not stage.put_unordered(ticket, out, True):
                    stage.unwanted(out)
            stage.finish_ticket(ticket)
        else:
            stage.token_unordered(ticket, item)
        yield


def _expand(stage: StageRun, worker: Worker) -> Loop:
    """One chunk in, any number out, alone or pooled, ordered or not."""
    pooled, unordered = stage.pooled, stage.unordered
    inbox = stage.inboxes[0]
    put, put_at = stage.putter(), stage.lane_putter()
    nested = not stage.plan.unordered_above
    process = stage.failures.guard_children(worker, worker.operator.process)
    meter, memory, reserve, now = worker.meter, stage.account, stage.run.account.reserve, perf_counter_ns
    first = stage.first_in_line if pooled else None
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
                stage.token_unordered(ticket, item)
            elif pooled:
                put_at(ticket, item, True)
            else:
                put(item)
            yield
            continue
        skip = _children_to_drop(stage, item)
        parent, held, before, epoch = item, item.buffers, item.before, item.epoch
        children = None
        index = 0
        while stage.stop_epoch < epoch:
            # A child may be a view of its parent, or the parent be read on: it is held to the last.
            reserved = reserve(memory, first, ticket) if memory.guarded else 0
            start = now()
            child: Any
            try:
                if children is None:
                    children = iter(process(parent))
                child = next(children, None)
                if child is not None and not isinstance(child, Chunk):
                    raise not_a_chunk(child, stage.name, "each item of process")
            except BaseException as error:
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
                    child.before, child.after = (
                        before,
                        before,
                    )  # its last child cannot be told from the others
                child.epoch = epoch
                meter.items += 1
                meter.samples += len(child.rows)
            stage.settle(worker, reserved, (), child)
            if unordered:
                kept = stage.put_unordered(ticket, child, False)
            else:
                kept = put_at(ticket, child, False) if pooled else put(child)
            if not kept:
                stage.unwanted(child)
            if not pooled:
                yield
        del children
        meter.calls += 1
        stage.forget(ticket)
        stage.drop(0, held)
        if unordered:
            stage.finish_ticket(ticket)
        elif pooled:
            stage.close_lane(ticket)
            stage.moved()
        yield


def _children_to_drop(stage: StageRun, parent: Chunk) -> int:
    drop = stage.restart.drop
    if drop is not None and parent.epoch == stage.run.first_epoch and same(parent.before, drop[0]):
        return drop[1]
    return 0


def _regroup(stage: StageRun, worker: Worker) -> Loop:
    """Chunks in, other chunks out."""
    get, put = stage.inboxes[0].get, stage.putter()
    operator: Regroup = worker.operator
    operator.begin()
    if stage.restart.cursor is not None:
        operator.resume(stage.restart.cursor)
    memory, reserve = stage.account, stage.run.account.reserve
    account = stage.run.account
    held = _Held(stage)
    marks = _Marks(stage) if stage.plan.marked else None

    def send(made: Iterable[Any]) -> Loop:
        for out in made:
            if out.__class__ is Chunk:
                worker.meter.items += 1
                worker.meter.samples += len(out.rows)
                if marks is not None:
                    marks.stamp(out)
            stage.settle(worker, 0, (), out)
            if out.__class__ is Chunk:
                held.release(out.rows)
            if not put(out):
                stage.unwanted(out)
            yield

    while True:
        item = get()
        if item.__class__ is Chunk:
            number_item(stage, worker, item)
            reserved = reserve(memory) if memory.guarded and operator.emits_next() else 0
            held.add(item)
            made = _regrouped(stage, worker, item, partial(operator.process, item), held)
            if reserved:
                account.cancel_reservation(reserved)
            if made:
                yield from send(made)
        elif isinstance(item, EndOfEpoch):
            yield from send(_regrouped(stage, worker, None, operator.flush, held, item.epoch))
            held.release_all()
            if marks is not None:
                marks.begin()
            put(item)
        elif isinstance(item, Mark) and marks is not None:
            # A group stands where its last sample stood: what turns the stream inside it comes before.
            mark = marks.take(item)
            if mark is not None:
                put(mark)
        elif not isinstance(item, Mark):
            put(item)
        yield


def _regrouped(
    stage: StageRun,
    worker: Worker,
    item: Chunk | None,
    call: Callable[[], Iterable[Any]],
    held: _Held,
    epoch: int = 0,
) -> list[Any]:
    """What a regrouping operator makes, or what takes the place of the samples with which it failed."""
    operator: Regroup = worker.operator
    operator.failing = ()
    start = perf_counter_ns()
    try:
        made = list(call())
    except BaseException as error:
        chunks = list(operator.failing) or ([] if item is None else [item])
        if chunks:
            lost = Chunk.group(chunks, None)
            held.release(lost.rows)
            failure: Any = stage.failures.handle(worker, lost, error)
        elif isinstance(error, Exception):
            error.add_note(f"pipegraph: stage {stage.name!r}, at the end of epoch {epoch}")
            failure = Failure(error, epoch)
        else:
            raise
        made = [] if failure is None else [failure]
    worker.meter.busy_ns += perf_counter_ns() - start
    worker.meter.calls += 1
    return made


class _Held:
    """The buffers of the chunks inside a regrouping operator, by sample, until that leaves."""

    def __init__(self, stage: StageRun) -> None:
        self._account = stage.run.account
        self._rows: dict[Any, list[Any]] = {}

    def add(self, chunk: Chunk) -> None:
        if chunk.buffers:
            # A sample that reaches a window by two ways is in it twice.
            self._rows.setdefault(chunk.rows[0], []).append(chunk.buffers)

    def release(self, rows: Iterable[Any]) -> None:
        if self._rows:
            gone: list[Any] = []
            for row in rows:
                waiting = self._rows.get(row)
                if waiting:
                    gone += waiting.pop()
                    if not waiting:
                        del self._rows[row]
            self._account.release(tuple(gone))

    def release_all(self) -> None:
        for waiting in self._rows.values():
            for buffers in waiting:
                self._account.release(buffers)
        self._rows.clear()


class _Marks:
    """Cursors of a regrouping stage through which the marks of a ``Route`` pass.

    A mark passes at once, before the open group. So a cursor is ``(the operator's, marks to drop)``: of the marks
    that come again after a restart from the operator's cursor, so many have left already.
    """

    def __init__(self, stage: StageRun) -> None:
        self._operator: Regroup = copy.copy(stage.plan.operator)  # type: ignore[assignment]
        self._drop = stage.restart.marks
        self._last: Cursor = stage.restart.base
        self._sent: list[Cursor] = []  # where in the input the marks stood that a restart would meet again

    def begin(self) -> None:
        """A new epoch."""
        self._drop, self._last, self._sent = 0, None, []

    def take(self, mark: Mark) -> Mark | None:
        """The mark as it leaves; None if it did so before the restart."""
        self._sent.append(mark.before)
        if self._drop:
            self._drop -= 1
            return None
        done = len(self._sent)
        return Mark(mark.route, mark.turn, mark.epoch, (self._last, done - 1), (self._last, done))

    def stamp(self, out: Chunk) -> None:
        """Give an output its cursors."""
        before, self._last = out.before, out.after
        out.before = (before, self._again(before))
        # Those before this output's end are not met again from there on.
        up = self._input(self._last)
        self._sent = [each for each in self._sent if not earlier(each, up)]
        out.after = (self._last, len(self._sent))

    def _again(self, cursor: Cursor) -> int:
        up = self._input(cursor)
        return sum(not earlier(each, up) for each in self._sent)

    def _input(self, cursor: Cursor) -> Cursor:
        return None if cursor is None else copy.copy(self._operator).resume(cursor)
