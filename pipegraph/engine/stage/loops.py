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

from pipegraph.chunk import Chunk, Mark
from pipegraph.contracts import RowOperator, Source
from pipegraph.engine.stage.bundle_loops import (
    collect_bundles,
    read_bundles,
    read_in_sequence,
    work_on_bundles,
)
from pipegraph.engine.stage.cursors import same
from pipegraph.engine.stage.failure_policy import not_a_chunk
from pipegraph.engine.stage.merge_route import merge_loop, route_loop
from pipegraph.engine.stage.regroup_loop import regroup_loop
from pipegraph.engine.stage.row_parallel import rows_loop, whole_batches
from pipegraph.engine.stage.sidecar_loop import sidecar_loop
from pipegraph.engine.stage.source_loops import groups_loop, reading, sequence_loop
from pipegraph.engine.stage.stage_run import StageRun, Worker
from pipegraph.planning.isolation import Elsewhere
from pipegraph.tree import ATOMS

Loop = Iterator[None]
Process = Callable[[Chunk], Any]


def loop_for(stage: StageRun, worker: Worker) -> Loop:
    """The loop of a stage."""
    operator = stage.plan.operator
    if stage.pace is not None:
        if isinstance(operator, Source):
            return (read_bundles if operator.random_access else read_in_sequence)(stage, worker)
        return (work_on_bundles if operator.kind == "map" else collect_bundles)(stage, worker)
    if isinstance(operator, Elsewhere):
        return sidecar_loop(stage, worker)
    if isinstance(operator, Source):
        if not operator.random_access:
            return sequence_loop(stage, worker)
        if worker.operator.group > 1:
            return groups_loop(stage, worker)
        process = reading(worker.operator)
        if stage.unordered:
            return _map_unordered(stage, worker, process)
        return (_map_pooled if stage.pooled else _map_alone)(stage, worker, process)
    if operator.stateful:
        from pipegraph.engine.stage.stateful_loop import stateful_loop

        return stateful_loop(stage, worker)
    if isinstance(operator, RowOperator) and not stage.plan.remote:
        return rows_loop(stage, worker)
    if operator.kind == "map":
        process = worker.operator.process
        if isinstance(operator, RowOperator):
            process = whole_batches(stage, worker)
        if stage.unordered:
            return _map_unordered(stage, worker, process)
        return (_map_pooled if stage.pooled else _map_alone)(stage, worker, process)
    if operator.kind == "expand":
        return _expand(stage, worker)
    if operator.kind == "regroup":
        return regroup_loop(stage, worker)
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
                if out is not item and out.__class__ is not Chunk:
                    stage.check_made(out)
            except BaseException as error:
                out = stage.failures.handle(worker, item, error)
            meter.busy_ns += now() - start
            meter.calls += 1
            if out is None:
                meter.dropped += 1
                stage.drop(reserved, held)
            else:
                if out is not item:
                    _place_of(item, out)
                if out.__class__ is Chunk:
                    meter.items += 1
                    meter.samples += len(out.lineages)
                if held or reserved or out.__class__ is not Chunk or out.data.__class__ not in ATOMS:
                    stage.settle(worker, reserved, held, out)
                if not put(out):
                    stage.unwanted(out)
        else:
            put(item)
        yield


def _place_of(item: Chunk, out: Any) -> None:
    """What a one-to-one operator made takes its input's place in the stream."""
    if isinstance(out, Chunk):
        out.before, out.after, out.epoch = item.before, item.after, item.epoch


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
                if out is not item and out.__class__ is not Chunk:
                    stage.check_made(out)
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
                    _place_of(item, out)
                if out.__class__ is Chunk:
                    meter.items += 1
                    meter.samples += len(out.lineages)
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
                if out is not item and out.__class__ is not Chunk:
                    stage.check_made(out)
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
                    _place_of(item, out)
                meter.items += 1
                meter.samples += len(out.lineages)
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
                meter.samples += len(child.lineages)
            stage.settle(worker, reserved, (), child)
            if unordered:
                kept = stage.put_unordered(ticket, child, False)
            else:
                kept = put_at(ticket, child, False) if pooled else put(child)
            if not kept:
                stage.unwanted(child)
            yield  # whoever drives an inline stage may be the one who makes room
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
