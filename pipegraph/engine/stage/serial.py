"""The loop of stages with one worker, in order: what it makes of an item depends on those before it, or beside it.

Regrouping operators, operators with a state, fan-ins and routes differ in what they do with an item (``Serial.take``),
and fan-ins in where the next one comes from (``Serial.get``). What they have in common is here: one item after the
other, what is held meanwhile, the policy's answer, and the end of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, Cursor, EndOfEpoch, Failure, Item, Lineage
from pipegraph.engine.channel import Channel
from pipegraph.engine.memory import Account, Buffers
from pipegraph.engine.stage.bundle_size import BUNDLE_NS
from pipegraph.engine.stage.failure_policy import outcome_of
from pipegraph.engine.stage.hand_over import hand_over, rows_of
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Loop, Worker
from pipegraph.tree import buffers


class RowIntake:
    """Takes single rows from a channel, for one worker; ``waits`` is called before it may wait for one."""

    def __init__(self, channel: Channel, account: Account, waits: Callable[[], None]) -> None:
        self._channel = channel
        self._account = account
        self._waits = waits
        self._rows: list[Chunk] = []  # the rest of a bundle, in reverse order

    def get(self) -> Item:
        """The next chunk or token; blocks while there is none."""
        if self._rows:
            return self._rows.pop()
        self._waits()
        item: Item = self._channel.get()
        if item.__class__ is not Bundle:
            return item
        self._rows = rows_of(item, self._account)[::-1]
        return self._rows.pop()

    def drop(self) -> None:
        """Drop the rest of the bundle taken last."""
        for one in self._rows:
            self._account.release(one.buffers)
        self._rows.clear()


class Held:
    """The buffers of the items that were taken for the next result: they leave with it."""

    def __init__(self) -> None:
        self._items: list[Buffers] = []

    def add(self, item: Chunk) -> None:
        """Record an item that was taken."""
        if item.buffers:
            self._items.append(item.buffers)

    def leave(self, rows: Sequence[Lineage]) -> Buffers:
        """The buffers that leave with a result of these samples."""
        return self.leave_all() if self._items else ()

    def drop(self, rows: Sequence[Lineage]) -> Buffers:
        """The buffers of samples that have left without a result."""
        return self.leave(rows)

    def leave_all(self) -> Buffers:
        """All that is left."""
        found, self._items = self._items, []
        return tuple(chain.from_iterable(found))


class Serial:
    """What a kind does with the items of its stage, in one run. Used by the stage's worker alone."""

    def __init__(self, stage: StageRun, worker: Worker) -> None:
        self.stage, self.worker, self.operator = stage, worker, worker.operator
        self.account = stage.run.account
        self.gathers = stage.plan.kind.gathers
        self.held = Held()
        self._together = stage.plan.bundle_rows
        self._rows: list[Chunk] = []  # results that wait for others, to be handed over with them
        self._room = 1
        self._of: list[tuple[int, int]] = []  # the buffers that they were made of
        self._since_ns = 0
        self.get: Callable[[], Item] = RowIntake(stage.inboxes[0], self.account, self.hand_on).get
        """The next item; the end of the epoch after the last."""

    def begin(self, epoch: int, cursor: Cursor) -> None:
        """An epoch begins; ``cursor``: of the output, where it is resumed in its middle."""

    def take(self, item: Chunk) -> Iterable[None]:
        """Do an item, and send what comes of it; yields after each result that may not be the last."""
        raise NotImplementedError

    def end(self, end: EndOfEpoch) -> Iterable[None]:
        """As :meth:`take`, at the end of an epoch."""
        return ()

    def send(self, out: Chunk | Failure, more: bool = False) -> None:
        """Hand over a result, or keep a row for the next ones, for up to ``BUNDLE_NS`` of work; ``more``: as for
        ``Sender.send``."""
        held = self.held.leave(out.lineages) if isinstance(out, Chunk) else ()
        if self._together == 1 or not isinstance(out, Chunk) or not Bundle.takes(out):
            self.hand_on()
            hand_over(self.stage, self.worker, 0, out, held, True, more)
            return
        if not self._rows:
            nbytes = sum([size for _, size in buffers(out.data)])
            self._room = min(self._together, max(1, self.stage.pace.nbytes // max(1, nbytes)))
        self._rows.append(out)
        self._of += held
        if len(self._rows) >= self._room or self.worker.meter.busy_ns - self._since_ns > BUNDLE_NS:
            self.hand_on()

    def hand_on(self) -> None:
        """Hand over the rows that wait: the worker may have to wait for its next item."""
        rows, held, self._since_ns = self._rows, tuple(self._of), self.worker.meter.busy_ns
        if rows:
            self._rows, self._of = [], []
            hand_over(self.stage, self.worker, 0, Bundle.of(rows) if len(rows) > 1 else rows[0], held)

    def made(self, item: Chunk | EndOfEpoch, call: Callable[[], list[Chunk]]) -> Sequence[Chunk | Failure]:
        """What the operator makes in a call, or what the policy puts in the place of the samples that failed in it."""
        operator, worker, failures = self.operator, self.worker, self.stage.failures
        if self.gathers:
            operator.failing = ()
        made, error = worker.meter.timed(outcome_of, call)
        worker.meter.calls += 1
        if error is None:
            found: list[Chunk] = made[0]
            return found
        try:
            failures.pass_on(error)
            failing: Sequence[Chunk] = getattr(operator, "failing", ())
            lost = Chunk.group(failing, None) if failing else item
            if isinstance(lost, EndOfEpoch):
                return [failures.at_flush(error, lost.epoch)]
            self.account.release(self.held.drop(lost.lineages))
            failure = failures.handle(worker, lost, error)
            return [] if failure is None else [failure]
        finally:
            error = failure = None  # its traceback refers to this frame


def serial(work: Serial) -> Loop:
    """See the module docstring."""
    stage, worker, take = work.stage, work.worker, work.take
    cursor, budgeted = stage.restart.cursor, stage.budgeted
    for epoch in count(stage.run.first_epoch):
        work.begin(epoch, cursor)
        cursor, get = None, work.get
        while not isinstance(item := get(), EndOfEpoch):
            if isinstance(item, Chunk):
                if budgeted:
                    stage.number(worker, item)
                yield from take(item)
            else:
                to_all(stage, item)
            yield
        yield from work.end(item)
        work.hand_on()
        work.account.release(work.held.leave_all())
        to_all(stage, item)
        yield


def to_all(stage: StageRun, token: EndOfEpoch | Failure) -> None:
    """To all outputs, because any of them may be read first."""
    for sender in stage.senders:
        sender.token(0, token)
