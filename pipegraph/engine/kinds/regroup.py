"""Regrouping operators without a state: one worker, in order.

A cursor is the operator's own: where its input resumes follows from its ``resume``.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, Cursor, EndOfEpoch, Failure
from pipegraph.contracts import Regroup
from pipegraph.engine.memory import Buffers
from pipegraph.engine.stage.hand_over import settle
from pipegraph.engine.stage.row_intake import RowIntake
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Worker
from pipegraph.errors import MemoryLimitError
from pipegraph.parameters import chunks_of
from pipegraph.planning.kind import Reached, Restart, StageKind
from pipegraph.planning.plan import StagePlan
from pipegraph.tree import buffers
from pipegraph.units import format_bytes

Loop = Iterator[None]


class RegroupKind(StageKind):
    """See the module docstring."""

    keeps = True
    gathers = True
    collects = True

    def hands_over_rows(self, stage: StagePlan) -> bool:
        return stage.traits.blocks and not stage.unordered_above

    def split(self, stage: StagePlan, cursor: Cursor) -> tuple[Restart, list[Cursor]]:
        operator: Any = copy.copy(stage.operator)
        up = None if cursor is None else operator.resume(cursor)
        return Restart(cursor=None if stage.unordered_above else cursor), [up]

    def reached(
        self, stage: StagePlan, at: Reached, draw: tuple[int, int], drops: bool
    ) -> Sequence[Reached] | None:
        operator: Any = stage.operator
        passed = operator.handed_on(at.cursor, at.more, (*draw, stage.name))
        if passed is None or (passed[1] and at.holes):
            return None
        cursor, holes, more = passed
        return super().reached(stage, Reached(cursor, more, holes or at.holes), draw, drops)

    def why_unknown(self, operator: Any) -> str | None:
        tells = type(operator).handed_on is not Regroup.handed_on
        return "it holds items of its own choice" if resumes_itself(operator) and not tells else None

    def loop(self, stage: StageRun, worker: Worker) -> Loop:
        return regroup_loop(stage, worker)


def resumes_itself(operator: Any) -> bool:
    """Whether an operator's class has a ``resume`` of its own, so that its cursors are not its input's."""
    return type(operator).resume is not Regroup.resume


def regroup_loop(stage: StageRun, worker: Worker) -> Loop:
    """See the module docstring. An operator with ``bundles`` takes the rows of a bundle in one call."""
    operator: Any = worker.operator
    operator.begin()
    if stage.restart.cursor is not None:
        operator.resume(stage.restart.cursor)
    in_order = stage.plan.traits.trusted or operator.spent is not None
    held = HeldInOrder(stage) if in_order else Held(stage)
    together = stage.plan.bundle_rows
    inbox, sender = stage.inboxes[0], stage.sender
    get = inbox.get if stage.collects else RowIntake(inbox, stage.run.account).get
    process = stage.failures.seeded(operator.process)

    def outputs(made: Sequence[Any]) -> Iterator[Any]:
        for out in made if together == 1 else in_bundles(made, together, stage.pace.nbytes):
            if isinstance(out, Chunk):
                rows = len(out.lineages)
                worker.meter.items += rows if out.__class__ is Bundle else 1
                worker.meter.samples += rows
                settle(stage, worker, (), out)
                if operator.spent is None:
                    held.release(out.lineages)
            yield out

    def made_of(item: Chunk) -> Sequence[Any]:
        several = item.__class__ is Bundle
        call: Callable[[Any], Any] = operator.take_bundle if several else process
        made = regrouped(stage, worker, item, partial(call, item), held)
        if several:
            worker.meter.calls += len(item.lineages) - 1
        if operator.spent:
            held.release(operator.spent)
            operator.spent.clear()
        return made

    while True:
        item = get()
        if isinstance(item, Chunk):
            stage.number(worker, item)
            held.add(item)
            # One group at a time, so that a group that fails does not affect another. Groups of a packed bundle
            # only have to be sliced: the next stage is woken once for all of them.
            start, count = 0, item.count
            while start < count:
                stop = min(count, start + (1 if count == 1 else operator.missing()))
                part: Chunk = item
                if stop - start < count:
                    assert isinstance(item, Bundle)
                    part = item.part(start, stop)
                more = stop < count and item.packed is not None
                for out in outputs(made_of(part)):
                    sender.send(0, out, more=more)
                    yield
                if start and stop == count:
                    sender.wake()
                start = stop
            del part
        elif isinstance(item, EndOfEpoch):
            flush = stage.failures.flushing(operator.flush, item.epoch)
            for out in outputs(regrouped(stage, worker, item, flush, held)):
                sender.send(0, out)
                yield
            held.release_all()
            sender.token(0, item)
        else:
            sender.send(0, item)
        yield


def in_bundles(made: Sequence[Any], rows: int, nbytes: int) -> Iterator[Any]:
    """The results of a call, with rows in bundles of up to ``rows`` rows and about ``nbytes`` bytes."""
    waiting: list[Chunk] = []
    for out in made:
        if out.__class__ is not Chunk or not Bundle.takes(out):
            if waiting:
                yield Bundle.of(waiting)
            waiting = []
            yield out
            continue
        if not waiting:
            rows = min(rows, max(1, nbytes // max(1, sum([size for _, size in buffers(out.data)]))))
        waiting.append(out)
        if len(waiting) >= rows:
            yield Bundle.of(waiting)
            waiting = []
    if waiting:
        yield Bundle.of(waiting)


def regrouped(
    stage: StageRun, worker: Worker, item: Chunk | EndOfEpoch, call: Callable[..., Any], held: Held
) -> Sequence[Any]:
    """Call a regrouping operator; returns its chunks, or what the policy puts in place of failed samples.

    Args:
        item: what the operator is given; the end of an epoch for ``flush``.
    """
    operator: Regroup = worker.operator
    operator.failing = ()

    def answer(error: BaseException) -> Failure | None:
        chunks = list(operator.failing) or ([item] if isinstance(item, Chunk) else [])
        if not chunks:
            return stage.failures.at_flush(error, item.epoch)
        lost = Chunk.group(chunks, None)
        held.release(lost.lineages)
        return stage.failures.handle(worker, lost, error)

    return stage.failures.once(worker, lambda: list(chunks_of(call())), answer)


class Held:
    """The buffers of chunks that a regrouping operator holds, by sample, until the sample leaves."""

    def __init__(self, stage: StageRun) -> None:
        self._stage = stage
        self._account = stage.run.account
        self._rows: dict[Any, list[Any]] = {}

    def add(self, chunk: Chunk) -> None:
        """Record a chunk that the operator is given."""
        if chunk.buffers:
            # A sample that reaches a window through two branches is in it twice.
            self._rows.setdefault(chunk.lineages[0], []).append(chunk.buffers)
        self._check()

    def _check(self) -> None:
        """Raise MemoryLimitError if what is held exceeds the memory limit."""
        account = self._account
        if account.used <= account.limit:
            return
        nbytes = sum({each: nbytes for buffers in self._buffers() for each, nbytes in buffers}.values())
        if nbytes > account.limit:
            raise MemoryLimitError(
                f"stage {self._stage.name!r}: its open batch or window of {format_bytes(nbytes)} is larger than "
                f"memory_limit={format_bytes(account.limit)}; raise memory_limit, or make batches and windows smaller"
            )

    def _buffers(self) -> Iterable[Buffers]:
        return chain.from_iterable(self._rows.values())

    def release(self, rows: Sequence[Any]) -> None:
        """Release the buffers of samples that have left."""
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
        """Release all buffers."""
        for waiting in self._rows.values():
            for each in waiting:
                self._account.release(each)
        self._rows.clear()


class HeldInOrder(Held):
    """As :class:`Held`, for operators whose samples leave in the order in which they came."""

    def __init__(self, stage: StageRun) -> None:
        super().__init__(stage)
        self._inside: deque[list[Any]] = deque()  # [samples still held, buffers]

    def add(self, chunk: Chunk) -> None:
        self._inside.append([len(chunk.lineages), chunk.buffers])
        self._check()

    def _buffers(self) -> Iterable[Buffers]:
        return (buffers for _, buffers in self._inside)

    def release(self, rows: Sequence[Any]) -> None:
        left = len(rows)
        while left and self._inside:
            oldest = self._inside[0]
            gone = min(left, oldest[0])
            left -= gone
            oldest[0] -= gone
            if not oldest[0]:
                self._account.release(self._inside.popleft()[1])

    def release_all(self) -> None:
        while self._inside:
            self._account.release(self._inside.popleft()[1])
