"""One-to-one stages and filters, for samples and batches: each item leaves in its place, with its cursors.

A worker takes a chunk, or a bundle of rows. Operators with ``bundles`` do these one after the other in one call; the
result of each row takes the row's place. All others get each row as
a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from pipegraph.bundle import DROPPED, Bundle, PackedParts, named
from pipegraph.chunk import Chunk, Failure
from pipegraph.engine.stage.ahead import Ahead
from pipegraph.engine.stage.row_intake import rows_of
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage.unit import Unit
from pipegraph.engine.stage_worker import Worker
from pipegraph.errors import GraphError, note
from pipegraph.planning.kind import Reached, StageKind
from pipegraph.planning.plan import StagePlan
from pipegraph.tree import copy_containers

if TYPE_CHECKING:
    from pipegraph.columns import Columns
    from pipegraph.engine.remote.contract import Call

_FAILED = object()
"""Marks a row whose failure was sent separately."""

Process = Callable[[Chunk], Any]


class MapKind(StageKind):
    """See the module docstring."""

    parallel = True
    in_place = True
    by_sample = True
    looks_ahead = True
    """Whether a remote operator is given its next item early."""

    def one_to_one(self, operator: Any) -> bool:
        return bool(operator.one_to_one)

    def hands_over_rows(self, stage: StagePlan) -> bool:
        return stage.traits.blocks

    def reached(
        self, stage: StagePlan, at: Reached, draw: tuple[int, int], drops: bool
    ) -> Sequence[Reached] | None:
        return super().reached(stage, at, draw, drops or not stage.work.one_to_one)

    def loop(self, stage: StageRun, worker: Worker) -> Iterator[bool]:
        process = self.process(stage, worker)
        return map_loop(stage, worker, process, MapUnit(stage, worker), stage.pace.rows, self.looks_ahead)

    def process(self, stage: StageRun, worker: Worker) -> Process:
        """The function that does one item."""
        process: Process = worker.operator.process
        return process


def map_loop(
    stage: StageRun,
    worker: Worker,
    process: Process,
    unit: MapUnit,
    rows: Callable[[], int] | None,
    looks_ahead: bool,
) -> Iterator[bool]:
    """See the module docstring.

    Args:
        process: does one item.
        unit: does bundles.
        rows: returns how many rows of a bundle to take; None: whole bundles.
    """
    take, sender = stage.inboxes[0].take, stage.sender
    process = stage.failures.seeded(process)
    single = partial(do_single, stage, worker, stage.failures.guard(worker, process))
    bundles = rows is None or stage.plan.traits.blocks
    account = stage.run.account
    ahead = Ahead(stage, worker, rows, unit.call)
    if stage.plan.remote and looks_ahead:
        worker.operator.look_ahead(ahead)
    while True:
        if ahead.holds:
            ticket, item = ahead.take()
        else:
            ticket, item = take(None if rows is None else rows())
        worker.ticket = ticket
        if item.__class__ is Bundle:
            if bundles:
                unit.work(ticket, item, process)
            else:
                ones = rows_of(item, account)
                for row, one in enumerate(ones):
                    single(ticket, one, row, row == len(ones) - 1)
                del ones, one
        elif item.__class__ is Chunk:
            single(ticket, item, 0, True)
        else:
            sender.token(ticket, item)
        del item
        yield ahead.holds


def do_single(
    stage: StageRun,
    worker: Worker,
    process: Process,
    ticket: int,
    item: Chunk,
    row: int,
    last: bool,
) -> None:
    """Do one chunk, row ``row`` of the item taken."""
    held = item.buffers
    out = stage.attempt(worker, item, process, row)
    if out is not item and out.__class__ is Chunk:
        of, came = out.lineages, item.lineages
        if (
            of is came or of == came or set(of) <= set(came)
        ):  # the result takes the item's place in the stream
            out.before, out.after, out.epoch = item.before, item.after, item.epoch
        else:
            out = Failure(_other_sample(stage.name, out, item), item.epoch)
    stage.leave(worker, ticket, out, held, last)
    del out  # a failure's traceback refers to this frame


def _other_sample(stage: str, out: Chunk, item: Chunk) -> GraphError:
    """The error for an operator that returned a chunk that it was given before, or that of nobody."""
    if out.lineages[0][:-1] == item.lineages[0]:
        return GraphError(
            f"stage {stage!r}: process returned child {out.lineages[0][-1]} of {_described(item.lineages[0])}, which "
            "is a sample of its own, where a map gives each chunk its own result. Return chunk.replace(data). An "
            "operator that makes several samples of one has kind = 'expand' and returns chunk.child(0, ...), "
            "chunk.child(1, ...)"
        )
    return GraphError(
        f"stage {stage!r}: process was given {_described(item.lineages[0])} and returned "
        f"{_described(out.lineages[0])}. A map gives each chunk its own result, else a resume would lose the sample "
        "that it holds: return the chunk, or chunk.replace(data). An operator that holds samples back keeps them in a "
        "state, with state_dict() and load_state_dict()"
    )


class MapUnit(Unit):
    """A bundle in work by an operator with ``bundles``."""

    bundle: Bundle

    def __init__(self, stage: StageRun, worker: Worker) -> None:
        super().__init__(stage, worker)
        self.operator = worker.operator
        self._retries = stage.plan.spec.retry.times > 0
        self._filters = stage.plan.source is None and not stage.plan.work.one_to_one
        self._drops = False
        self._prepared: tuple[Bundle, Any] | None = None  # the next bundle, and its argument for the operator
        self._columns: Any = None  # the results, where they were made as columns
        traits = stage.plan.traits
        self._in_columns = traits.columns and (stage.pack is not None or stage.unpacked_below)
        self._encodes = traits.encoded and stage.unpacked_below
        self._may_pack = (self._in_columns or self._encodes) and not stage.plan.remote

    def call(self, item: Chunk) -> Call | None:
        """The call to a remote operator for the next item; None if it is not known yet."""
        if item.__class__ is not Bundle:
            return None if self._retries else self.operator.call_for(item)
        given = self.give(item)
        self._prepared = item, given
        return self.call_with(given)

    def work(self, ticket: int, bundle: Bundle, process: Process) -> None:
        """Do the samples of a bundle and send the results.

        Args:
            process: does one sample, for retries.
        """
        self.begin(ticket, bundle.buffers)
        self.bundle, self._drops, self._columns = bundle, False, None
        prepared, self._prepared = self._prepared, None
        self.begin_bundle_with(bundle, None if prepared is None else prepared[1])
        made, count, meter = self.made, bundle.count, self.worker.meter
        meter.began_ns = perf_counter_ns()
        while len(made) < count:
            try:
                self.extend(made)
            except BaseException as error:
                if len(made) >= count:  # no sample's, which a policy could leave out
                    note(error, f"pipegraph: stage {self.stage.name!r}, after the last sample of a bundle")
                    raise
                self._apply_policy(made, error, process)
            else:
                if len(made) != count:
                    raise self._miscounted(len(made), count)
        spent = perf_counter_ns() - meter.began_ns
        meter.worked(spent)
        meter.calls += count
        self.send(last=True)
        self.pace.note(count, spent, self.nbytes)

    def _miscounted(self, found: int, asked: int) -> GraphError:
        """The error for an operator or order that does not give one result for each of its samples."""
        return GraphError(
            f"stage {self.stage.name!r}: {type(self.operator).__name__} gave {found} results for {asked} samples of "
            "a bundle: its work_into or read_into must append one for each (pipegraph.bundle.DROPPED for one it drops)"
        )

    def give(self, bundle: Bundle) -> Any:
        """The argument for the operator, made from a bundle."""
        if bundle.packed is not None:  # who is given it makes the samples, and says their keys
            return bundle
        # Fix the keys first: the function may drop the field.
        bundle.names = named(bundle.data, bundle.names)
        if not self._retries:
            return bundle
        # A function that fails may have changed its containers before.
        data = [copy_containers(item) for item in bundle.data]
        return Bundle(data, bundle.lineages, bundle.epoch, bundle.before, bundle.names, bundle.places)

    def call_with(self, given: Any) -> Call:
        """The call to a remote operator for all rows of its argument."""
        return "work", given, 0, given.count

    def begin_bundle_with(self, bundle: Bundle, given: Any) -> None:
        """Begin a bundle; ``given`` is the result of :meth:`give` for it, or None if there is none yet."""
        self._given = self.give(bundle) if given is None else given

    def extend(self, made: list[Any]) -> None:
        """Append the results for the rest of the samples; the first failure is raised."""
        if self._may_pack and not made and self.in_one(self.bundle.count):
            made += repeat(None, self.bundle.count)
        else:
            self.operator.work_into(made, self._given, len(made))
            if self.stage.plan.remote:
                self.keep_packed(made)

    def keep_packed(self, made: list[Any]) -> None:
        """Keep results packed as a process has sent them; those with keys of their own become rows."""
        found = self.operator.take_packed()
        if found is None:
            return
        if found.kind is dict and "key" in found.data:
            made[:] = found.rows()
        else:
            # In memory of their own: that between processes is used again.
            spans = self.stage.batches_of(self.bundle)
            self._columns = PackedParts.of([found.part(*span).copy() for span in spans], spans)

    def in_one(self, rows: int) -> bool:
        """Let the operator pack all rows for the next stage; returns whether it did."""
        stage = self.stage
        if not stage.pace.packs(rows):
            return False
        found: Any = None
        with suppress(Exception):  # row by row it comes again, and is that row's
            found = self.columns() if self._in_columns else None
            if found is None and self._encodes:
                found = self.encoded()
        if found is not None:
            spans = [(0, rows)] if stage.unpacked_below else stage.batches_of(self.bundle)
            # Separate memory for each batch: one that is kept long does not keep the others alive.
            parts = [found] if len(spans) == 1 else [found.part(*span).copy() for span in spans]
            self._columns = PackedParts.of(parts, spans)
        return found is not None

    def columns(self) -> Columns | None:
        """The results for the bundle, packed; None where they are made one by one."""
        found: Columns | None = self.operator.columns(self.bundle)
        return found

    def encoded(self) -> Any:
        """The results for the bundle, not made yet; None where they are made one by one."""
        return self.operator.encoded(self.bundle)

    def _apply_policy(self, made: list[Any], error: BaseException, process: Process) -> None:
        """Apply the policy to the next sample, whose first try failed with ``error``; append its result to ``made``."""
        stage, index = self.stage, len(made)
        out: Any
        try:
            one = self.bundle.one(index)
        except Exception as broken:  # which the process was the first to see
            out = stage.above[0].failures.give_up(self.bundle.named_one(index, None), broken)
        else:
            try:
                out = stage.failures.try_again(self.worker, partial(self._retry, process, one), error)
                stage.check_made(out)
            except BaseException as last:
                out = stage.failures.handle(self.worker, one, last, index)
        finally:
            del error  # its traceback refers to this frame
        if isinstance(out, Chunk):
            made.append(out.data)
            return
        self._drops = True
        if out is None:
            made.append(DROPPED)
        else:
            self.send()
            paused = self.worker.meter.pause()
            self.sender.send(self.ticket, out, False)
            self.worker.meter.resume(paused)
            made.append(_FAILED)
        del out

    def _retry(self, process: Process, one: Chunk) -> Any:
        return process(one.replace(copy_containers(one.data)))

    def part(self, start: int, stop: int) -> Chunk | None:
        bundle, data = self.bundle, self.made[start:stop]
        names, rows, places = bundle.names, bundle.lineages, bundle.places
        before = bundle.place(start)[0] if start else bundle.before
        if len(data) < len(rows):
            rows = rows[start:stop]
            names = None if names is None else names[start:stop]
            places = None if places is None else places[start:stop]
        if self._columns is not None:
            out = Bundle([], rows, bundle.epoch, before, names, places)
            out.take_packed(self._columns.part(start, stop))
            return out
        out = Bundle(data, rows, bundle.epoch, before, self.named(data, names), places)
        if not self._drops and not self._filters:
            return out
        kept = [index for index, item in enumerate(data) if item is not DROPPED and item is not _FAILED]
        if len(kept) == len(data):
            return out
        self.worker.meter.dropped += sum([item is DROPPED for item in data])
        return out.chosen(kept) if kept else None

    def named(self, data: list[Any], names: list[Any] | None) -> list[Any] | None:
        """The keys of the results."""
        return names


def _described(row: Any) -> str:
    """A sample's description for messages."""
    return f"the sample of {row[0]!r} at position {', '.join(map(str, row[1:]))}"
