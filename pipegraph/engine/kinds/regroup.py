"""Regrouping operators without a state: one worker, in order.

A cursor is the operator's own: where its input resumes follows from its ``resume``.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import cast

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, Cursor, EndOfEpoch, Failure, Item, Lineage
from pipegraph.contracts import Operator, Regroup, Source
from pipegraph.engine.memory import Buffers
from pipegraph.engine.stage.serial import Held, Serial, serial
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Loop, Worker
from pipegraph.errors import MemoryLimitError
from pipegraph.planning.kind import Reached, Restart, StageKind
from pipegraph.planning.plan import StagePlan
from pipegraph.units import format_bytes


class RegroupKind(StageKind):
    """See the module docstring."""

    keeps = True
    gathers = True
    collects = True

    def hands_over_rows(self, stage: StagePlan) -> bool:
        return not stage.unordered_above

    def split(self, stage: StagePlan, cursor: Cursor) -> tuple[Restart, list[Cursor]]:
        operator = cast(Regroup, copy.copy(stage.operator))
        up = None if cursor is None else operator.resume(cursor)
        return Restart(cursor=None if stage.unordered_above else cursor), [up]

    def reached(
        self, stage: StagePlan, at: Reached, draw: tuple[int, int], drops: bool
    ) -> Sequence[Reached] | None:
        operator = cast(Regroup, stage.operator)
        passed = operator.handed_on(at.cursor, at.more, (*draw, stage.name))
        if passed is None or (passed[1] and at.holes):
            return None
        cursor, holes, more = passed
        return super().reached(stage, Reached(cursor, more, holes or at.holes), draw, drops)

    def why_unknown(self, operator: Operator | Source) -> str | None:
        tells = type(cast(Regroup, operator)).handed_on is not Regroup.handed_on
        return "it holds items of its own choice" if resumes_itself(operator) and not tells else None

    def loop(self, stage: StageRun, worker: Worker) -> Loop:
        return serial(_Regrouping(stage, worker))


def resumes_itself(operator: object) -> bool:
    """Whether an operator's class has a ``resume`` of its own, so that its cursors are not its input's."""
    return type(cast(Regroup, operator)).resume is not Regroup.resume


class _Regrouping(Serial):
    """An operator with ``bundles`` takes the rows of a bundle in one call."""

    def __init__(self, stage: StageRun, worker: Worker) -> None:
        super().__init__(stage, worker)
        spends = self.operator.spent is not None
        in_order = _HeldInOrder if stage.plan.traits.trusted else _HeldBySample
        self.held = _HeldUntilSpent(stage) if spends else in_order(stage)
        if stage.collects:
            self.get = self._next_bundle
        self._process = stage.failures.seeded(self.operator.process)
        self._begun = False

    def _next_bundle(self) -> Item:
        self.hand_on()  # it may have to wait
        return self.stage.inboxes[0].get()

    def begin(self, epoch: int, cursor: Cursor) -> None:
        if not self._begun:  # ``flush`` leaves it empty
            self._begun = True
            self.operator.begin()
        if cursor is not None:
            self.operator.resume(cursor)

    def take(self, item: Chunk) -> Iterator[None]:
        self.held.add(item)
        # One group at a time, so that a group that fails does not affect another. Groups of a packed bundle
        # only have to be sliced: the next stage is woken once for all of them.
        start, count, part = 0, item.count, item
        while start < count:
            stop = min(count, start + (1 if count == 1 else self.operator.missing()))
            if stop - start < count:
                assert isinstance(item, Bundle)
                part = item.part(start, stop)
            call = self._process
            if part.__class__ is Bundle:
                call = self.operator.take_bundle
                self.worker.meter.calls += part.count - 1
            for out in self._results(part, partial(call, part)):
                self.send(out, more=stop < count and item.packed is not None)
                yield
            start = stop
        if part is not item:
            self.stage.sender.wake()

    def end(self, end: EndOfEpoch) -> Iterator[None]:
        for out in self._results(end, self.stage.failures.flushing(self.operator.flush, end.epoch)):
            self.send(out)
            yield

    def _results(
        self, item: Chunk | EndOfEpoch, call: Callable[[], Iterable[Chunk]]
    ) -> Iterable[Chunk | Failure]:
        made = self.made(item, lambda: list(call()))
        if spent := self.operator.spent:
            self.account.release(self.held.drop(spent))
            spent.clear()
        return made


class _HeldBySample(Held):
    """Until the sample that an item is leaves."""

    def __init__(self, stage: StageRun) -> None:
        self._stage = stage
        self._rows: dict[Lineage, list[Buffers]] = {}

    def add(self, item: Chunk) -> None:
        if item.buffers:
            # A sample that reaches a window through two branches is in it twice.
            self._rows.setdefault(item.lineages[0], []).append(item.buffers)
        self._check()

    def _check(self) -> None:
        """Raise MemoryLimitError if what is held exceeds the memory limit."""
        account = self._stage.run.account
        if account.used <= account.limit:
            return
        nbytes = sum(dict(chain.from_iterable(self._buffers())).values())
        if nbytes > account.limit:
            raise MemoryLimitError(
                f"stage {self._stage.name!r}: its open batch or window of {format_bytes(nbytes)} is larger than "
                f"memory_limit={format_bytes(account.limit)}; raise memory_limit, or make batches and windows smaller"
            )

    def _buffers(self) -> Iterable[Buffers]:
        return chain.from_iterable(self._rows.values())

    def leave(self, rows: Sequence[Lineage]) -> Buffers:
        found: list[tuple[int, int]] = []
        for row in rows if self._rows else ():
            if waiting := self._rows.get(row):
                found += waiting.pop()
                if not waiting:
                    del self._rows[row]
        return tuple(found)

    def leave_all(self) -> Buffers:
        found = tuple(chain.from_iterable(self._buffers()))
        self._clear()
        return found

    def _clear(self) -> None:
        self._rows.clear()


class _HeldInOrder(_HeldBySample):
    """For operators whose samples leave in the order in which they came."""

    def __init__(self, stage: StageRun) -> None:
        super().__init__(stage)
        self._inside: deque[tuple[int, Buffers]] = deque()
        self._gone = 0  # samples of the oldest item that have left

    def add(self, item: Chunk) -> None:
        self._inside.append((len(item.lineages), item.buffers))
        self._check()

    def _buffers(self) -> Iterable[Buffers]:
        return (buffers for _, buffers in self._inside)

    def leave(self, rows: Sequence[Lineage]) -> Buffers:
        found: list[tuple[int, int]] = []
        self._gone += len(rows)
        while self._inside and self._gone >= self._inside[0][0]:
            samples, buffers = self._inside.popleft()
            self._gone -= samples
            found += buffers
        if not self._inside:
            self._gone = 0
        return tuple(found)

    def _clear(self) -> None:
        self._inside.clear()
        self._gone = 0


class _HeldUntilSpent(_HeldInOrder):
    """For operators that say which samples they no longer hold: their results leave with none."""

    def leave(self, rows: Sequence[Lineage]) -> Buffers:
        return ()

    def drop(self, rows: Sequence[Lineage]) -> Buffers:
        return super().leave(rows)
