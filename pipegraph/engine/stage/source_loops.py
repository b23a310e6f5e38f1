"""The loops of sources: in sequence, or, where they are random-access, as positions that workers read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from operator import index as as_int
from time import perf_counter_ns
from typing import Any

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, EndOfEpoch, Failure, Lineages
from pipegraph.contracts import Source
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.channel import Channel
from pipegraph.engine.stage.failure_policy import is_interrupt
from pipegraph.engine.stage.stage_run import StageRun, Worker
from pipegraph.errors import note
from pipegraph.tree import ATOMS

Loop = Iterator[None]

SNAPSHOT_EVERY = 64
"""Items between two snapshots of an iterator that can give one."""


def sequence_loop(stage: StageRun, worker: Worker) -> Loop:
    """One worker reads what can only be read in sequence."""
    source: Source = worker.operator
    run, name = stage.run, stage.name
    meter, memory, reserve, put, now = (
        worker.meter,
        stage.account,
        run.account.reserve,
        stage.putter(),
        perf_counter_ns,
    )
    epoch = run.first_epoch
    step = stage.restart.step
    while True:
        run.horizon.wait_for(epoch)
        items: Iterator[tuple[int, Any]] | None = None
        while stage.stop_epoch < epoch:
            reserved = reserve(memory) if memory.guarded else 0
            start = now()
            try:
                if items is None:
                    stage.snapshots.restore(source, epoch, run.first_epoch)
                    items = iter(source.iterate(epoch, run.rank, run.world_size, step))
                found = next(items, None)
            except BaseException as error:
                stage.drop(reserved, ())
                put(failure_of(stage, error, epoch, step))
                break
            if found is None:
                stage.drop(reserved, ())
                break
            position, data = found
            if position.__class__ is not int:
                position = as_int(position)  # NumPy's numbers are no JSON
            failure = None if (step + 1) % SNAPSHOT_EVERY else snapshot_of(stage, source, epoch, step + 1)
            chunk = Chunk(data, ((name, position),), epoch, step, step + 1)
            step += 1
            meter.busy_ns += now() - start
            meter.items += 1
            meter.samples += 1
            if reserved or data.__class__ not in ATOMS:
                if data.__class__ is dict and "key" in data:
                    chunk.keys = (data["key"],)
                stage.settle(worker, reserved, (), chunk)
            if not put(chunk):
                stage.unwanted(chunk)
            if failure is not None:
                put(failure)
                break
            yield
        del items  # a generator ends here, and what it holds open is closed
        put(EndOfEpoch(epoch))
        epoch += 1
        step = 0
        yield


def snapshot_of(stage: StageRun, source: Source, epoch: int, step: int) -> Failure | None:
    """Keep how the source's iterator stands before ``step``, if it can say so; what is wrong with it, if anything."""
    try:
        snapshot = source.snapshot()
        if snapshot is not None:
            stage.snapshots.add(epoch, step, snapshot)
    except BaseException as error:
        return failure_of(stage, error, epoch, step)
    return None


def failure_of(stage: StageRun, error: BaseException, epoch: int, step: int) -> Failure:
    """What stands where a source broke off; nothing of the epoch follows."""
    if isinstance(error, Cancelled) or is_interrupt(stage, error):
        raise error  # the run's end, or Ctrl-C in the consumer's thread
    if isinstance(error, StopIteration | StopAsyncIteration):
        wrapped = RuntimeError(f"stage {stage.name!r}: raised {type(error).__name__}")
        wrapped.__cause__ = error
        error = wrapped
    note(error, f"pipegraph: stage {stage.name!r}, item {step} of this rank, epoch {epoch}")
    return Failure(error, epoch)


def positions_loop(stage: StageRun, source: Source, inner: Channel) -> Loop:
    """Feed the positions of a random-access source to its workers, which read them like a map stage.

    Inline: a worker that finds ``inner`` empty steps this until it has something to do.
    """
    run, name, pace = stage.run, stage.name, stage.pace
    epoch, step = run.first_epoch, stage.restart.step
    # Bundles are dealt one at a time: how long they should be may be known better soon.
    room = inner.stats().capacity if pace is None else 1
    began = step
    while True:
        run.horizon.wait_for(epoch)
        filled = 0
        positions: Iterator[Any] | None = None
        while stage.stop_epoch < epoch:
            group: list[Any] = []
            failure: Failure | None = None
            try:
                if positions is None:
                    positions = iter(source.positions(epoch, run.rank, run.world_size, step))
                # What was drawn before an error stays.
                group.extend(islice(positions, source.group if pace is None else pace.rows(step - began)))
            except BaseException as error:
                failure = failure_of(stage, error, epoch, step + len(group))
            if not group:
                if failure is not None:
                    inner.put(failure)
                break
            places = list(map(as_int, [drawn.position for drawn in group] if source.draws else group))
            if pace is not None:
                inner.put(Bundle(group, Lineages(name, places), epoch, step))
            else:
                rows = tuple([(name, position) for position in places])
                data = group if source.group > 1 else group[0]
                inner.put(Chunk(data, rows, epoch, step, step + len(group)))
            step += len(group)
            if failure is not None:
                inner.put(failure)
                break
            filled += 1
            if filled == room:
                filled = 0
                yield
        inner.put(EndOfEpoch(epoch))
        epoch, step, began = epoch + 1, 0, 0
        yield


def reading(source: Source) -> Callable[[Chunk], Chunk]:
    """``process`` for the workers of a random-access source: a position in, its item out."""

    def read(chunk: Chunk) -> Chunk:
        data = source.read(chunk.data, chunk.epoch)
        chunk.data = data
        if data.__class__ is dict and "key" in data:
            chunk.keys = (data["key"],)
        return chunk

    return read


def groups_loop(stage: StageRun, worker: Worker) -> Loop:
    """A worker of a source that reads several positions in one call (a data set's ``__getitems__``).

    A call that fails is made again item by item, so that policies see the item that fails.
    """
    source: Source = worker.operator
    inbox, meter, now = stage.inboxes[0], worker.meter, perf_counter_ns
    put, put_at = stage.putter(), stage.lane_putter()
    while True:
        ticket, item = inbox.take()
        worker.ticket = ticket
        if item.__class__ is not Chunk:
            if stage.unordered:
                stage.token_unordered(ticket, item)
            elif stage.pooled:
                put_at(ticket, item, True)
            else:
                put(item)
            yield
            continue
        count = len(item.lineages)
        first = stage.first_in_line if stage.pooled else None
        memory = stage.account
        reserved = stage.run.account.reserve(memory, first, ticket, count) if memory.guarded else 0
        share = reserved // count
        start = now()
        try:
            found: list[Any] | None = list(source.read_many(item.data, item.epoch))
            if len(found or ()) != count:
                found = None
        except Exception:
            found = None
        meter.busy_ns += now() - start
        meter.calls += 1
        for index in range(count):
            row, step = item.lineages[index], item.before + index
            one = Chunk(item.data[index], (row,), item.epoch, step, step + 1)
            out: Any = one
            start = now()
            try:
                if found is None:
                    out = stage.failures.guard(worker, reading(source))(one)
                else:
                    one.data = found[index]
                    if one.data.__class__ is dict and "key" in one.data:
                        one.keys = (one.data["key"],)
            except BaseException as error:
                out = stage.failures.handle(worker, one, error)
            meter.busy_ns += now() - start
            if out is None:
                meter.dropped += 1
                stage.drop(share, ())
                continue
            meter.items += 1
            meter.samples += 1
            if memory.guarded or out.__class__ is not Chunk or out.data.__class__ not in ATOMS:
                stage.settle(worker, share, (), out)
            if stage.unordered:
                kept = stage.put_unordered(ticket, out, False)
            else:
                kept = put_at(ticket, out, False) if stage.pooled else put(out)
            if not kept:
                stage.unwanted(out)
            yield  # whoever drives an inline stage may be the one who makes room
        if stage.unordered:
            stage.finish_ticket(ticket)
        elif stage.pooled:
            stage.close_lane(ticket)
        stage.forget(ticket)
        if stage.pooled:
            stage.moved()
        yield
