"""The loop of stages that do each row by itself: take a block, do its rows, send the results in its place.

A block is a chunk, or a bundle of rows. What does its rows is the only thing in which maps, filters and reads differ,
and threads, processes and actors; see ``failure_policy.Outcome``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns
from typing import Any

from pipegraph.bundle import DROPPED, Bundle, PackedParts, named
from pipegraph.chunk import Chunk, Failure, Item
from pipegraph.columns import Columns
from pipegraph.engine.memory import Buffers
from pipegraph.engine.stage.failure_notes import checked
from pipegraph.engine.stage.failure_policy import Do, Outcome
from pipegraph.engine.stage.hand_over import batches_of, hand_over, rows_of
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import HALFWAY, Loop, Worker
from pipegraph.errors import GraphError

QUICK_NS = 10_000_000
"""Items at longer intervals, times the cost of a call, are not taken ahead: the wait is short compared to them, and at
the end of an epoch idle workers should get them."""

NextItem = tuple[int, Item]
"""Ticket and item."""


class LookAhead:
    """Takes a worker's next item early, so that its process or actor always has one queued.

    With one item in flight a process would wait, after each answer, for the trainer, whose interpreter may be busy with
    training; with two it does not. An item taken ahead has its ticket like any other. The worker does it next in any
    case, even if it is to leave. Used by its worker alone.

    Args:
        begin: sends an item that will be done after the one in work.
        bundles: whether bundles are done as a whole; if not, their rows are sent as they are done.
    """

    def __init__(
        self, stage: StageRun, worker: Worker, begin: Callable[[Chunk], None], bundles: bool
    ) -> None:
        self._inbox = stage.inboxes[0]
        self._worker = worker
        self._begin = begin
        self._bundles = bundles
        self._quick_ns = QUICK_NS * stage.plan.backend.call_cost
        self._rows: int | None = None
        self._taken: NextItem | None = None
        self._asked_ns = 0

    @property
    def holds(self) -> bool:
        """Whether an item was taken ahead."""
        return self._taken is not None

    def take(self, rows: int | None) -> NextItem:
        """The next item; ``rows`` as for ``Channel.take``."""
        taken, self._taken, self._rows = self._taken, None, rows
        return self._inbox.take(rows) if taken is None else taken

    def look(self) -> None:
        """Take and send the item after the one in work, if there is one to spare."""
        now, last = perf_counter_ns(), self._asked_ns
        self._asked_ns = now
        if self._taken is not None or now - last > self._quick_ns or self._worker.leaves:
            return
        self._taken = self._inbox.take_ahead(self._rows)
        item = None if self._taken is None else self._taken[1]
        if isinstance(item, Chunk) and (self._bundles or not isinstance(item, Bundle)):
            with suppress(Exception):  # of a sampler: raised again when the item's turn comes
                self._begin(item)


def parallel(stage: StageRun, worker: Worker, do: Do, rows: Callable[[], int] | None, several: bool) -> Loop:
    """See the module docstring.

    Args:
        rows: returns how many rows of a bundle to take; None: whole bundles.
        do: does the rows of a block: a chunk becomes a chunk, and a bundle what its rows become.
        several: whether it does bundles; else it is given their rows as chunks.
    """
    sender = stage.sender
    ahead: LookAhead | None = None
    take: Callable[[int | None], tuple[int, Any]] = stage.inboxes[0].take
    if stage.plan.remote:
        ahead = LookAhead(stage, worker, worker.operator.begin, several)
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
    if isinstance(made, PackedParts):
        return made
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
