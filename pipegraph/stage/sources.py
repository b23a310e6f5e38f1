"""The loops of sources: in sequence, or, where they are random-access, as positions that workers read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter_ns

from pipegraph.channel import Channel
from pipegraph.chunk import Chunk, EndOfEpoch, Failure
from pipegraph.contracts import Source
from pipegraph.stage.stage import StageRun, Worker
from pipegraph.tree import ATOMS

Loop = Iterator[None]


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
        failed = False
        try:
            items = iter(source.iterate(epoch, run.rank, run.world_size, step))
        except Exception as error:
            items, failed = iter(()), True
            put(_failure(error, name, epoch, step))
        while not failed and stage.stop_epoch < epoch:
            reserved = reserve(memory) if memory.largest else 0
            start = now()
            try:
                position, data = next(items)
            except StopIteration:
                stage.drop(reserved, ())
                break
            except Exception as error:
                stage.drop(reserved, ())
                put(_failure(error, name, epoch, step))
                failed = True
                break
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
            yield
        close = getattr(items, "close", None)
        if close is not None:
            close()
        if failed:
            while True:  # nothing can follow; the consumer ends the run when it meets the failure
                run.horizon.wait_forever()
        put(EndOfEpoch(epoch))
        epoch += 1
        step = 0
        yield


def _failure(error: BaseException, name: str, epoch: int, step: int) -> Failure:
    if isinstance(error, StopIteration | StopAsyncIteration):
        wrapped = RuntimeError(f"stage {name!r}: raised {type(error).__name__}")
        wrapped.__cause__ = error
        error = wrapped
    error.add_note(f"pipegraph: stage {name!r}, item {step} of this rank, epoch {epoch}")
    return Failure(error, epoch)


def positions_loop(stage: StageRun, source: Source, inner: Channel) -> Loop:
    """Feed the positions of a random-access source to its workers, which read them like a map stage.

    Inline: a worker that finds ``inner`` empty steps this until it has something to do.
    """
    run, name = stage.run, stage.name
    epoch, step = run.first_epoch, stage.restart.step
    room = inner.stats().capacity
    while True:
        run.horizon.wait_for(epoch)
        filled = 0
        for position in source.positions(epoch, run.rank, run.world_size, step):
            if stage.stop_epoch >= epoch:
                break
            inner.put(Chunk(int(position), ((name, int(position)),), epoch, step, step + 1))
            step += 1
            filled += 1
            if filled == room:
                filled = 0
                yield
        inner.put(EndOfEpoch(epoch))
        epoch, step = epoch + 1, 0
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
