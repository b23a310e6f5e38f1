"""The loop of one-to-one stages, filters and random-access sources: samples, batches or positions in, the same out.

A worker takes a chunk, or as many rows as it is quick with. Operators with ``bundles`` do these one after the other in
one call; what becomes of each, also of one that fails, takes its place. For all others a row is a chunk of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice, repeat
from time import perf_counter_ns
from typing import Any

from pipegraph.bundle import DROPPED, UNNAMED, Bundle, PackedParts, named
from pipegraph.chunk import Chunk
from pipegraph.contracts import Operator, RowOperator, Source
from pipegraph.engine.process.contract import Call
from pipegraph.engine.stage.ahead import Ahead
from pipegraph.engine.stage.row_intake import rows_of
from pipegraph.engine.stage.row_parallel import whole_batches
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage.unit import Unit
from pipegraph.engine.stage_worker import Worker
from pipegraph.global_generators import Draws
from pipegraph.policies import Retry
from pipegraph.tree import copy_containers

_FAILED = object()
"""In place of a row whose failure has left by itself."""

Loop = Iterator[bool]
Process = Callable[[Chunk], Any]


def map_loop(stage: StageRun, worker: Worker) -> Loop:
    """See the module docstring."""
    operator = worker.operator
    take, sender, rows = stage.inboxes[0].take, stage.sender, stage.pace.rows
    reads = isinstance(stage.plan.operator, Source)
    if stage.plan.followers:
        process: Process = operator.process
    elif reads:
        process = _reading(operator)
    elif isinstance(stage.plan.operator, RowOperator):
        process = whole_batches(stage, worker)
    else:
        process = operator.process
    process = stage.failures.numbered(process)
    single = partial(_single, stage, worker, stage.failures.guard(worker, process))
    kind = _Running if stage.plan.followers else _Reading if reads else _Mapping
    unit = kind(stage, worker)
    bundles = reads or stage.plan.operator.bundles
    account = stage.run.account
    ahead = Ahead(stage, worker, None if reads else rows, unit.call)
    if stage.plan.remote and (stage.plan.followers or not isinstance(stage.plan.operator, RowOperator)):
        operator.look_ahead(ahead)
    while True:
        ticket, item, granted = ahead.take() or (*take(None if reads else rows(), sender.demand()), None)
        worker.ticket = ticket
        if item.__class__ is Bundle:
            if bundles:
                unit.work(ticket, item, process, granted)
            else:
                ones = rows_of(item, account)
                for row, one in enumerate(ones):
                    single(ticket, one, row, row == len(ones) - 1)
                del ones, one
        elif item.__class__ is Chunk:
            single(ticket, item, 0, True, granted)
        else:
            sender.token(ticket, item)
        del item
        yield ahead.holds


def _reading(source: Source) -> Process:
    """``process`` of a random-access source: a position in, its item out."""

    def read(chunk: Chunk) -> Chunk:
        data = chunk.data = source.read(chunk.data, chunk.epoch)
        if data.__class__ is dict and "key" in data:
            chunk.keys = (data["key"],)
        return chunk

    return read


def _single(
    stage: StageRun,
    worker: Worker,
    process: Process,
    ticket: int,
    item: Chunk,
    row: int,
    last: bool,
    granted: int | None = None,
) -> None:
    """Do one chunk, row ``row`` of what was taken; ``granted`` bytes are reserved for it."""
    memory, held = stage.account, item.buffers
    reserved = granted
    if reserved is None:
        reserved = stage.run.account.reserve(memory, stage.sender.first, ticket) if memory.guarded else 0
    out = stage.attempt(worker, item, process, row)
    if out is not item and out.__class__ is Chunk:  # what was made of an item takes its place
        out.before, out.after, out.epoch = item.before, item.after, item.epoch
    stage.leave(worker, ticket, out, held, reserved, last)
    del out  # a failure: its traceback leads to this frame


class _Mapping(Unit):
    """The rows of a bundle, in the hands of an operator with ``bundles``."""

    bundle: Bundle

    def __init__(self, stage: StageRun, worker: Worker) -> None:
        super().__init__(stage, worker)
        self.operator = worker.operator
        self._here = not stage.plan.remote
        self._retries = isinstance(stage.plan.spec.on_error, Retry)
        operator = stage.plan.operator
        self._filters = isinstance(operator, Operator) and not operator.one_to_one
        self._drops = False
        self._keys: dict[int, Any] = {}  # of substitutes
        self._prepared: tuple[Bundle, Any] | None = None  # what is given of the bundle that is next

    def call(self, item: Chunk) -> Call | None:
        """What an operator elsewhere will be called with for an item whose turn is next; None: not known yet."""
        if item.__class__ is not Bundle:
            return None if self._retries else self.operator.call_for(item)
        given = self.give(item)
        self._prepared = item, given
        return self.calls_with(given)

    def work(self, ticket: int, bundle: Bundle, process: Process, granted: int | None = None) -> None:
        """Do the samples of a bundle and send what becomes of them.

        Args:
            process: does one sample, for another try.
            granted: bytes that are reserved for what is made; None: none yet.
        """
        self.begin(ticket, bundle.buffers, granted)
        self.bundle, self._drops, self._keys = bundle, False, {}
        prepared, self._prepared = self._prepared, None
        self.start_with(bundle, None if prepared is None else prepared[1])
        made, count, spent, meter = self.made, bundle.count, 0, self.worker.meter
        while len(made) < count:
            stop = len(made) + self.reserve(count - len(made))
            away, start = self.away_ns, perf_counter_ns()
            while len(made) < stop:
                try:
                    self.extend(made, stop)
                except BaseException as error:
                    self._instead(made, error, process)
            spent += perf_counter_ns() - start - (self.away_ns - away)
        meter.busy_ns += spent
        meter.calls += count
        self.send(last=True)
        self.pace.note(count, spent, self.nbytes)

    def give(self, bundle: Bundle) -> Any:
        """What the operator is given of a bundle."""
        # Identity stays with the sample, whatever the function drops.
        bundle.names = named(bundle.data, bundle.names)
        if not self._retries:
            return bundle
        # A function that fails half-way may have changed its containers.
        data = [copy_containers(item) for item in bundle.data]
        return Bundle(data, bundle.lineages, bundle.epoch, bundle.before, bundle.names, bundle.places)

    def calls_with(self, given: Any) -> Call:
        """The call of an operator elsewhere that does all that it is given."""
        return "work", given, 0, given.count

    def start_with(self, bundle: Bundle, given: Any) -> None:
        """A bundle is begun; ``given``: what :meth:`give` has made of it, if that is known."""
        self._given = self.give(bundle) if given is None else given

    def extend(self, made: list[Any], stop: int) -> None:
        """Append what is made of the samples up to ``stop``, until one fails."""
        given = self._given if stop == self._given.count else self._given.part(0, stop)
        if self._here:
            given.data = self.watched(given.data)
        self.operator.work_into(made, given, len(made))

    def _instead(self, made: list[Any], error: BaseException, process: Process) -> None:
        """What takes the place of the sample with which the first try has failed."""
        stage, index = self.stage, len(made)
        one = self.bundle.one(index)
        out: Any
        try:
            out = stage.failures.try_again(self.worker, partial(self._again, process, one), error)
            stage.check_made(out)
        except BaseException as last:
            out = stage.failures.handle(self.worker, one, last, index)
        finally:
            del error  # its traceback leads to this frame
        if isinstance(out, Chunk):
            if out._keys is not None:
                self._keys[index] = out._keys[0]
            made.append(out.data)
            return
        self._drops = True
        if out is None:
            made.append(DROPPED)
        else:
            self.send()
            self.sender.send(self.ticket, out, False)
            made.append(_FAILED)
        del out

    def _again(self, process: Process, one: Chunk) -> Any:
        return process(one.replace(copy_containers(one.data)))

    def part(self, start: int, stop: int) -> Chunk | None:
        bundle, data = self.bundle, self.made[start:stop]
        names, rows, places = bundle.names, bundle.lineages, bundle.places
        if self._keys:
            names = [UNNAMED] * len(rows) if names is None else list(names)
            for index, key in self._keys.items():
                names[index] = key
        if len(data) < len(rows):
            rows = rows[start:stop]
            names = None if names is None else names[start:stop]
            places = None if places is None else places[start:stop]
        out = Bundle(data, rows, bundle.epoch, bundle.place(start)[0], self.named(data, names), places)
        if not self._drops and not self._filters:
            return out
        kept = [index for index, item in enumerate(data) if item is not DROPPED and item is not _FAILED]
        if len(kept) == len(data):
            return out
        self.worker.judged.dropped += sum([item is DROPPED for item in data])
        return out.chosen(kept) if kept else None

    def named(self, data: list[Any], names: list[Any] | None) -> list[Any] | None:
        """The keys of what was made."""
        return names


class _Reading(_Mapping):
    """The positions of a bundle, in the hands of a random-access source."""

    def give(self, bundle: Bundle) -> Any:
        return self.operator.indices_of(bundle.data, bundle.epoch)

    def calls_with(self, given: Any) -> Call:
        return "read", given, 0, len(given)

    def start_with(self, bundle: Bundle, given: Any) -> None:
        self._indices = given
        self._gathered: Any = None
        self._bundles = self.stage.plan.operator.bundles or self.stage.plan.remote
        self._draws = Draws(self.stage.run.seed, self.stage.name)

    def extend(self, made: list[Any], stop: int) -> None:
        bundle, source = self.bundle, self.operator
        if not self._bundles:
            epoch, add, draws, rows = bundle.epoch, made.append, self._draws, bundle.lineages
            for place in islice(self.watched(bundle.data), len(made), stop):
                draws.one(epoch, rows[len(made)])
                add(source.read(place, epoch))
            return
        if self._indices is None:
            self._indices = self.give(bundle)
        if not made and stop == bundle.count and self._gathers(stop):
            made += repeat(None, stop)
            return
        indices = self._indices if stop == bundle.count else self._indices[:stop]
        source.read_into(made, self.watched(indices) if self._here else indices, len(made))

    def _gathers(self, rows: int) -> bool:
        """Whether the source has put all rows together, for the ``Batch`` behind."""
        stage = self.stage
        if stage.pack is None or not self._here or not stage.pace.packs(rows):
            return False
        indices, gather = self._indices, self.operator.gather
        with suppress(Exception):
            # Each batch has its memory for itself: one that lives on keeps no other.
            spans = stage.pace.groups(self.bundle.before - self._first_step(), rows)
            found = [gather(indices[start:stop]) for start, stop in spans]
            if None not in found:
                self._gathered = found[0] if len(found) == 1 else PackedParts(found, spans)
        return self._gathered is not None

    def _first_step(self) -> int:
        """The step at which the first batch of the epoch begins."""
        run = self.stage.run
        return run.first_step(self.stage.name) if self.bundle.epoch == run.first_epoch else 0

    def part(self, start: int, stop: int) -> Chunk | None:
        out = super().part(start, stop)
        if self._gathered is not None:
            assert isinstance(out, Bundle)
            out.take_packed(self._gathered.part(start, stop))
        return out

    def named(self, data: list[Any], names: list[Any] | None) -> list[Any] | None:
        return named(data, names)


class _Running(_Mapping):
    """The rows of a bundle, in the hands of a run of stages in one process."""

    def give(self, bundle: Bundle) -> Any:
        given = bundle.part(0, len(bundle.lineages))
        self.operator.fill(given)
        return given

    def calls_with(self, given: Any) -> Call:
        return "run", given, 0

    def start_with(self, bundle: Bundle, given: Any) -> None:
        self._given = given
        self.operator.begin_bundle()

    def extend(self, made: list[Any], stop: int) -> None:
        bundle = self.bundle
        if self._given is None:
            self._given = self.give(bundle)
        try:
            self.operator.run_into(made, self._given, stop)
        finally:
            bundle.names = self._given.names
