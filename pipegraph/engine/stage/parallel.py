"""The loop of stages that do each row by itself: take a block, do its rows, send the results in its place.

A block is a chunk, or a bundle of rows. What does its rows is the only thing in which maps, filters and reads differ,
and threads, processes and actors; see ``failure_policy.Outcome``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pipegraph.bundle import DROPPED, Bundle, PackedParts, named
from pipegraph.chunk import Chunk, Failure
from pipegraph.columns import Columns
from pipegraph.engine.memory import Buffers
from pipegraph.engine.stage.ahead import Ahead
from pipegraph.engine.stage.failure_notes import checked
from pipegraph.engine.stage.failure_policy import Do, Outcome
from pipegraph.engine.stage.hand_over import batches_of, hand_over
from pipegraph.engine.stage.row_intake import rows_of
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import HALFWAY, Loop, Worker
from pipegraph.errors import GraphError


def parallel(stage: StageRun, worker: Worker, do: Do, rows: Callable[[], int] | None, several: bool) -> Loop:
    """See the module docstring.

    Args:
        rows: returns how many rows of a bundle to take; None: whole bundles.
        do: does the rows of a block: a chunk becomes a chunk, and a bundle what its rows become.
        several: whether it does bundles; else it is given their rows as chunks.
    """
    sender = stage.sender
    ahead: Ahead | None = None
    take: Callable[[int | None], tuple[int, Any]] = stage.inboxes[0].take
    if stage.plan.remote:
        ahead = Ahead(stage, worker, worker.operator.begin, several)
        take = ahead.take
        worker.operator.look_ahead(ahead.look)
    while True:
        ticket, item = take(None if rows is None else rows())
        worker.ticket = ticket
        if item.__class__ is Chunk:
            do_one(stage, worker, do, ticket, item)
        elif item.__class__ is not Bundle:
            sender.token(ticket, item)
        elif several:
            _several(stage, worker, do, ticket, item)
        else:
            ones = rows_of(item, stage.run.account)
            for row, one in enumerate(ones):
                do_one(stage, worker, do, ticket, one, row, row == len(ones) - 1)
            del ones, one
        del item
        yield HALFWAY if ahead is not None and ahead.holds else None


def do_one(
    stage: StageRun, worker: Worker, do: Do, ticket: int, item: Chunk, row: int = 0, last: bool = True
) -> None:
    """Do a chunk, row ``row`` of the item taken."""
    held = item.buffers
    (out,) = stage.failures.do_all(worker, item, do, row)
    if out is DROPPED:
        worker.meter.dropped += 1
        out = None
    elif out is not item and out.__class__ is Chunk:
        out.before, out.after, out.epoch = item.before, item.after, item.epoch
    try:
        hand_over(stage, worker, ticket, out, held, last)
    finally:
        del out  # a failure's traceback refers to this frame


def _several(stage: StageRun, worker: Worker, do: Do, ticket: int, bundle: Bundle) -> None:
    """Do a bundle."""
    meter, source = worker.meter, stage.plan.source is not None
    # Before it is done: the function may drop the field. Who is given packed samples makes them, and says their keys.
    if not source and bundle.packed is None:
        bundle.names = named(bundle.data, bundle.names)
    busy = meter.busy_ns
    made = stage.failures.do_all(worker, bundle, do)
    spent = meter.busy_ns - busy
    if isinstance(made, Columns) and made.kind is dict and "key" in made.data:
        made = made.rows()  # each has a key of its own
    if packed := not isinstance(made, list):
        out = bundle.replace([])
        out.take_packed(_by_batch(stage, bundle, made))
    else:
        out = bundle.replace(made)
        if source:
            out.names = named(out.data, None)
    if packed or (worker.whole and (source or stage.plan.work.one_to_one)):
        nbytes = hand_over(stage, worker, ticket, out, bundle.buffers)
    else:
        nbytes = _what_is_left(stage, worker, ticket, out, bundle.buffers)
    stage.pace.note(bundle.count, spent, nbytes)


def _what_is_left(stage: StageRun, worker: Worker, ticket: int, out: Bundle, held: Buffers) -> int:
    """Send the rows that were not left out, and failures in their places; returns the bytes."""
    kept: list[int] = []
    nbytes = 0
    for row, each in enumerate(out.data):
        if each is DROPPED:
            worker.meter.dropped += 1
        elif each.__class__ is not Failure:
            kept.append(row)
        else:
            out.data[row] = (
                DROPPED  # not held while others are sent: its traceback may come to refer to the loader
            )
            if kept:
                nbytes += hand_over(stage, worker, ticket, out.chosen(kept), last=False)
            stage.sender.send(ticket, each, False)
            kept = []
    rest = out if len(kept) == out.count else out.chosen(kept) if kept else None
    return nbytes + hand_over(stage, worker, ticket, rest, held)


def _by_batch(stage: StageRun, bundle: Bundle, made: Any) -> Any:
    """Columns as separate memory for each batch: one that is kept long does not keep the others alive."""
    spans = [(0, bundle.count)] if stage.unpacked_below else batches_of(stage, bundle)
    if len(spans) == 1 and not stage.plan.remote:  # memory between processes is used again
        return made
    return PackedParts.of([made.part(*span).copy() for span in spans], spans)


class ByChunk:
    """Calls a function with each chunk, which returns a chunk, or None if it may drop some."""

    def __init__(self, stage: StageRun, process: Callable[[Chunk], object]) -> None:
        self._stage, self._process = stage.name, stage.failures.seeded(process)
        self._operator = stage.plan.work
        # A function that fails may have changed its containers before.
        self._copies = stage.plan.spec.retry.times > 0

    def do(self, block: Chunk, at: int) -> Outcome:
        try:
            out = self._process(block.copied() if self._copies else block)
            return (out if out.__class__ is Chunk else checked(out, self._operator, self._stage),), None
        except BaseException as error:
            return (), error


class ByBundle(ByChunk):
    """Does the rows of a bundle in one call of the worker's operator."""

    def __init__(self, stage: StageRun, worker: Worker, process: Callable[[Chunk], object]) -> None:
        super().__init__(stage, process)
        self.worker = worker
        traits = stage.plan.traits
        self._columns, self._encoded = traits.columns, traits.encoded and stage.pack is None
        self._sent_packed = stage.pack is not None or stage.unpacked_below
        self.packs = stage.pace.packs if self._columns or self._encoded else None

    def do(self, block: Chunk, at: int) -> Outcome:
        if not isinstance(block, Bundle):
            return super().do(block, at)
        made: list[object] = []
        try:
            given = self.given(block.copied() if self._copies and block.packed is None else block)
            if not at and self.packs is not None and self.packs(block.count):
                with suppress(Exception):  # row by row it comes again, and is that row's
                    found: Any = self.columns(given) if self._columns else None
                    if found is None and self._encoded:
                        found = self.worker.operator.encoded(given)
                    if found is not None:
                        return found if self._sent_packed else found.rows(), None
            self.work_into(made, given, at)
        except BaseException as error:
            return made, error
        if at + len(made) != block.count:
            raise GraphError(
                f"stage {self._stage!r}: {type(self._operator).__name__} gave {len(made)} results for "
                f"{block.count - at} samples of a bundle: its work_into or read_into must append one for each "
                "(pipegraph.bundle.DROPPED for one it drops)"
            )
        return made, None

    def given(self, bundle: Bundle) -> Any:
        """The operator's argument for a bundle."""
        return bundle

    def work_into(self, made: list[object], given: object, at: int) -> None:
        """Append the results of the rows from one on; the first failure is raised."""
        self.worker.operator.work_into(made, given, at)

    def columns(self, given: object) -> Columns | None:
        """The results of all rows, packed; None where they are made one by one."""
        found: Columns | None = self.worker.operator.columns(given)
        return found
