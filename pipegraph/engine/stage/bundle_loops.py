"""The loops of stages that hand rows over in bundles; see ``pipegraph.bundle`` for what stays the same.

A stage does the samples of a bundle one after the other, and what becomes of them leaves in the bundle's
place: as bundles of neighbours, broken where a sample was skipped or failed. So whatever comes out, in
whichever bundles, is what would have come out sample by sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from operator import attrgetter
from operator import index as as_int
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from pipegraph.bundle import UNNAMED, Bundle, named
from pipegraph.chunk import Chunk, EndOfEpoch, Failure, Lineages
from pipegraph.contracts import Operator, Regroup, Source
from pipegraph.engine.memory import Buffers
from pipegraph.engine.stage.bundle_size import LIGHT_ROW_BYTES
from pipegraph.engine.stage.failure_policy import not_a_chunk
from pipegraph.engine.stage.regroup_loop import HeldBundles, regrouped
from pipegraph.engine.stage.source_loops import SNAPSHOT_EVERY, failure_of, reading, snapshot_of
from pipegraph.engine.stage.stage_run import StageRun, Worker
from pipegraph.policies import Retry
from pipegraph.tree import ATOMS, LONG_TEXT, buffers_of_each, copy_containers

Loop = Iterator[None]
Send = Callable[[int, Any, bool], bool]

SMALL_BYTES = LIGHT_ROW_BYTES
"""Buffers up to this size count with their bundle, one by one above: what they may share does not matter then."""

_nbytes = attrgetter("nbytes")
_numbers = itertools.count(-1, -1)  # below all addresses
_PLAIN = ATOMS | {str}


def read_bundles(stage: StageRun, worker: Worker) -> Loop:
    """A random-access source: positions in, their samples out."""
    source: Source = worker.operator
    take, read, done = stage.inboxes[0].take, reading(source), _Work(stage, worker)
    while True:
        ticket, item = take()
        worker.ticket = ticket
        if item.__class__ is not Bundle:
            done.send(ticket, item, True)
            yield
            continue
        done.work(ticket, item, done.reserve(ticket, item), partial(_read_into, source, item, []), read)
        yield


def _read_into(source: Source, bundle: Bundle, indices: list[Any], made: list[Any], start: int) -> None:
    if not indices:
        indices.append(source.indices_of(bundle.data, bundle.epoch))
    source.read_into(made, indices[0], start)


def work_on_bundles(stage: StageRun, worker: Worker) -> Loop:
    """A one-to-one stage: samples in, samples out."""
    operator: Operator = worker.operator
    take, done = stage.inboxes[0].take, _Work(stage, worker)
    retries = isinstance(stage.plan.spec.on_error, Retry)

    def process(chunk: Chunk) -> Any:
        # A function that failed half-way may have changed its containers.
        return operator.process(chunk.replace(copy_containers(chunk.data)))

    while True:
        ticket, item = take()
        worker.ticket = ticket
        if item.__class__ is not Bundle:
            done.send(ticket, item, True)
            yield
            continue
        reserved = done.reserve(ticket, item)
        item.names = named(
            item.data, item.names
        )  # identity stays with the sample, whatever the function drops
        given = item
        if retries:
            given = Bundle(copy_containers(item.data), item.lineages, item.epoch, item.before)
        done.work(ticket, item, reserved, partial(_work_into, operator, given), process)
        yield


def _work_into(operator: Operator, bundle: Bundle, made: list[Any], start: int) -> None:
    operator.work_into(made, bundle, start)


class _Work:
    """What one worker does with bundles, and how what becomes of them leaves."""

    def __init__(self, stage: StageRun, worker: Worker) -> None:
        assert stage.pace is not None
        self.stage = stage
        self.worker = worker
        self.pace = stage.pace
        put = stage.putter()
        self.send: Send = stage.lane_putter() if stage.pooled else lambda ticket, item, last: put(item)
        self._reads = isinstance(stage.plan.operator, Source)
        self._first = stage.first_in_line if stage.pooled else None

    def reserve(self, ticket: int, bundle: Bundle) -> int:
        """Room for what will be made of a bundle."""
        memory = self.stage.account
        if not memory.guarded:
            return 0
        return self.stage.run.account.reserve(memory, self._first, ticket, len(bundle.lineages))

    def work(
        self,
        ticket: int,
        bundle: Bundle,
        reserved: int,
        extend: Callable[[list[Any], int], None],
        process: Callable[[Chunk], Any],
    ) -> None:
        """Do a bundle's samples and send what becomes of them.

        Args:
            reserved: bytes, for all of them.
            extend: appends what is made of the samples from a number on, until one fails.
            process: does one sample, for another try.
        """
        stage, worker, now = self.stage, self.worker, perf_counter_ns
        meter, count = worker.meter, len(bundle.lineages)
        made: list[Any] = []
        keys: dict[int, Any] = {}  # of substitutes
        begun = spent = nbytes = 0
        start = now()
        while begun + len(made) < count:
            try:
                extend(made, begun + len(made))
            except BaseException as error:
                index = begun + len(made)
                out = self._another_way(bundle.one(index), error, index, process)
                if isinstance(out, Chunk):
                    made.append(out.data)
                    if out._keys is not None:
                        keys[index] = out._keys[0]
                    continue
                spent += now() - start
                if made:
                    share = reserved * len(made) // count
                    reserved -= share
                    nbytes += self._send(ticket, bundle, begun, made, keys, share, (), False)
                made, begun = [], index + 1
                if out is None:
                    meter.dropped += 1
                else:
                    self.send(ticket, out, False)
                start = now()
        spent += now() - start
        meter.busy_ns += spent
        meter.calls += count
        stage.forget(ticket)
        if made:
            nbytes += self._send(ticket, bundle, begun, made, keys, reserved, bundle.buffers, True)
        else:
            stage.drop(reserved, bundle.buffers)
            if stage.pooled:
                stage.close_lane(ticket)
        self.pace.note(stage.name, count, spent, nbytes)
        if stage.pooled:
            stage.moved()

    def _another_way(
        self, one: Chunk, error: BaseException, index: int, process: Callable[[Chunk], Any]
    ) -> Any:
        """What takes the place of a sample with which the first try failed: as :meth:`Failures.handle` has it."""
        failures = self.stage.failures
        try:
            out = failures.try_again(self.worker, partial(process, one), error)
            if not isinstance(out, Chunk):
                raise not_a_chunk(out, self.stage.name, "process")
            return out
        except BaseException as last:
            return failures.handle(self.worker, one, last, index)

    def _send(
        self,
        ticket: int,
        bundle: Bundle,
        begun: int,
        made: list[Any],
        keys: dict[int, Any],
        reserved: int,
        held: Buffers,
        last: bool,
    ) -> int:
        """Send neighbours that are done; returns their bytes."""
        names, rows = bundle.names, bundle.lineages
        if len(made) < len(rows):
            rows = rows[begun : begun + len(made)]
            names = None if names is None else names[begun : begun + len(made)]
        if keys:
            names = [UNNAMED] * len(made) if names is None else list(names)
            for index, key in keys.items():
                if begun <= index < begun + len(made):
                    names[index - begun] = key
        if self._reads:
            names = named(made, names)
        out = Bundle(made, rows, bundle.epoch, bundle.before + begun, names)
        stage, meter = self.stage, self.worker.meter
        settle(stage, self.worker, reserved, held, out)
        meter.items += len(made)
        meter.samples += len(made)
        if not self.send(ticket, out, last):
            stage.unwanted(out)
        return out.nbytes


def settle(stage: StageRun, worker: Worker, reserved: int, held: Buffers, out: Bundle) -> None:
    """Count what a call has made of what it was given."""
    if stage.pack is not None and stage.pace is not None and stage.pace.packs(len(out.lineages)):
        out.pack(stage.pack)
    out.buffers = measured(out)
    if out.buffers:
        out.nbytes = sum([nbytes for _, nbytes in out.buffers])
        worker.meter.nbytes += out.nbytes
    if out.buffers or reserved or held:
        stage.run.account.settle(stage.account, reserved, held, out.buffers, len(out.lineages))


def measured(bundle: Bundle) -> Buffers:
    """The buffers of a bundle's samples."""
    if bundle.packed is not None:
        found: Buffers = bundle.packed.buffers()
        return found
    nbytes = _light(bundle.data)
    if nbytes is None:
        return buffers_of_each(bundle.data)
    # Not the bundle's id: a part of it may outlive it in a batch, and another bundle be given the same id.
    return ((next(_numbers), nbytes),) if nbytes else ()


def _light(items: Any) -> int | None:
    """The bytes under the same field of several samples; None where they must be looked at one by one."""
    kinds = set(map(type, items))
    if kinds <= ATOMS:
        return 0
    if kinds <= _PLAIN:
        sizes = [len(item) for item in items if item.__class__ is str]
        return (sum(sizes) if max(sizes) >= LONG_TEXT else 0) if max(sizes) <= SMALL_BYTES else None
    if len(kinds) > 1:
        return None
    kind = kinds.pop()
    if kind is np.ndarray or kind is torch.Tensor:
        try:
            sizes = list(map(_nbytes, items))
        except RuntimeError:  # a sparse tensor has no bytes of its own
            return None
        return sum(sizes) if max(sizes) <= SMALL_BYTES else None
    if kind is bytes:
        sizes = list(map(len, items))
        return sum(sizes) if max(sizes) <= SMALL_BYTES else None
    if kind is tuple and len(set(map(len, items))) == 1:
        return _all_light(zip(*items, strict=True))
    if kind is dict:
        first = items[0].keys()
        if all(item.keys() == first for item in items):
            return _all_light([item[key] for item in items] for key in first)
    return None


def _all_light(columns: Iterable[Any]) -> int | None:
    found = 0
    for column in columns:
        nbytes = _light(column)
        if nbytes is None:
            return None
        found += nbytes
    return found


def read_in_sequence(stage: StageRun, worker: Worker) -> Loop:
    """A source that can only be read in sequence."""
    source: Source = worker.operator
    run, name, pace, put = stage.run, stage.name, stage.pace, stage.putter()
    meter, memory, now = worker.meter, stage.account, perf_counter_ns
    assert pace is not None
    epoch, step = run.first_epoch, stage.restart.step
    began = step
    snapshots: bool | None = None  # whether the iterator gives any: not known before it was begun
    while True:
        run.horizon.wait_for(epoch)
        items: Iterator[tuple[int, Any]] | None = None
        failure: Failure | None = None
        ended = False
        while stage.stop_epoch < epoch and not ended and failure is None:
            rows = pace.rows(step - began)
            if snapshots:  # they are taken between two items
                rows = min(rows, SNAPSHOT_EVERY - step % SNAPSHOT_EVERY)
            reserved = run.account.reserve(memory, items=rows) if memory.guarded else 0
            found: list[tuple[int, Any]] = []
            start = now()
            try:
                if items is None:
                    stage.snapshots.restore(source, epoch, run.first_epoch)
                    items = iter(source.iterate(epoch, run.rank, run.world_size, step))
                for pair in islice(items, rows):
                    found.append(pair)  # noqa: PERF402 (what came before an error stays)
                ended = len(found) < rows
                if snapshots is None:
                    snapshots = source.snapshot() is not None
            except BaseException as error:
                failure = failure_of(stage, error, epoch, step + len(found))
            spent = now() - start
            meter.busy_ns += spent
            if not found:
                stage.drop(reserved, ())
                continue
            data = [pair[1] for pair in found]
            out = Bundle(
                data, Lineages(name, [as_int(pair[0]) for pair in found]), epoch, step, named(data, None)
            )
            step += len(found)
            if snapshots and not step % SNAPSHOT_EVERY and not ended and failure is None:
                failure = snapshot_of(stage, source, epoch, step)
            meter.items += len(found)
            meter.samples += len(found)
            settle(stage, worker, reserved, (), out)
            pace.note(name, len(found), spent, out.nbytes)
            if not put(out):
                stage.unwanted(out)
            yield
        if failure is not None:
            put(failure)
        del items  # a generator ends here, and what it holds open is closed
        put(EndOfEpoch(epoch))
        epoch, step, began = epoch + 1, 0, 0
        yield


def collect_bundles(stage: StageRun, worker: Worker) -> Loop:
    """A ``Batch`` of rows that come in bundles."""
    get, put = stage.inboxes[0].get, stage.putter()
    operator: Regroup = worker.operator
    operator.begin()
    if stage.restart.cursor is not None:
        operator.resume(stage.restart.cursor)
    memory, account, meter = stage.account, stage.run.account, worker.meter
    held = HeldBundles(account)

    def send(made: list[Any]) -> Loop:
        for out in made:
            if out.__class__ is Chunk:
                meter.items += 1
                meter.samples += len(out.lineages)
            stage.settle(worker, 0, (), out)
            if out.__class__ is Chunk and operator.spent is None:
                held.release(out.lineages)
            if not put(out):
                stage.unwanted(out)
            yield

    while True:
        item = get()
        if item.__class__ is Bundle:
            reserved = account.reserve(memory) if memory.guarded and operator.fills(len(item.lineages)) else 0
            held.add(item)
            meter.calls += len(item.lineages) - 1
            made = regrouped(stage, worker, item, partial(operator.take_bundle, item), held)
            if reserved:
                account.cancel_reservation(reserved)
            if operator.spent:
                held.release(operator.spent)
                operator.spent.clear()
            if made:
                yield from send(made)
        elif item.__class__ is EndOfEpoch:
            yield from send(regrouped(stage, worker, None, operator.flush, held, item.epoch))
            held.release_all()
            put(item)
        else:
            put(item)
        yield
