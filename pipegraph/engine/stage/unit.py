"""A worker's bundle in work, whose finished rows may leave before the rest.

Rows that are done are handed over together once the bundle is done. But nobody may wait for a finished row:
the next stage may be idle, the function in work may be slow, or wait for something that only the consumer will do. So

* before it begins with rows the worker looks whether all workers of the next stage wait (``demand``); it sends them
  what is finished, or wakes one, so that it looks for itself;
* a thread that begins to wait sends what it finds finished itself (:meth:`Unit.offer_finished`), for the worker may be
  inside a function for long; where that is not enough it ends the worker's iteration at the next row, and the worker
  looks again: it sends what is enough, or else goes no further than to the row with which it is.

Each looks after it has made its own change known (the demand; the iterator), so one of them sees the other's. Between
rows the worker does nothing of its own: it runs through a plain list iterator.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from operator import attrgetter
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk
from pipegraph.engine.memory import Buffers
from pipegraph.engine.stage.bundle_size import LIGHT_ROW_BYTES
from pipegraph.engine.stage.row_intake import rows_of
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Worker
from pipegraph.tree import ATOMS, buffers_of_each

SMALL_BYTES = LIGHT_ROW_BYTES
"""Buffers up to this size count with their bundle, one by one above: what they may share does not matter then."""

_nbytes = attrgetter("nbytes")
_numbers = itertools.count(-1, -1)  # below all addresses
_PLAIN = ATOMS | {str}


class Unit:
    """One worker's unit of work. ``made`` grows by its worker alone; what leaves is taken from it under ``_lock``.

    Attributes:
        made: one entry per finished row.
        sent: how many of them have left.
        away_ns: time that the worker has spent sending them.
    """

    trims = False
    """Whether what has left is forgotten: a unit may have no end."""

    def __init__(self, stage: StageRun, worker: Worker) -> None:
        self.stage = stage
        self.worker = worker
        self.sender = stage.sender
        self.pace = stage.pace
        self.rows = stage.plan.bundle_rows
        self.made: list[Any] = []
        self.sent = 0
        self.ticket = 0
        self.nbytes = 0
        self.away_ns = 0
        self._reserved = 0
        self._expected = 0  # rows that the reservation is for and that have not left
        self._held: Buffers = ()
        self._left: list[Chunk] = []  # made by another thread, which found no room for it
        self._lock = threading.Lock()
        self._sending = False
        self._granted: int | None = None  # bytes that were reserved for all of it before it began
        self._rest: Any = iter(())  # through which the worker runs
        self._channel = self.sender.channels[0] if len(self.sender.channels) == 1 else None
        if self._channel is not None:
            self.sender.offers.append(weakref.WeakMethod(self.offer_finished))

    def begin(self, ticket: int, held: Buffers = (), granted: int | None = None) -> None:
        """Another unit begins; ``held`` are the buffers that it is made of, ``granted`` bytes are reserved for it."""
        with self._lock:
            self._granted = granted
            self.made, self.sent, self.ticket = [], 0, ticket
            self.nbytes = self.away_ns = self._reserved = self._expected = 0
            self._held = held

    def reserve(self, rows: int) -> int:
        """Room for as many of the next rows as fit now, at least one; returns how many. Sends what is finished."""
        stage = self.stage
        if self._granted is not None:
            with self._lock:
                self._reserved, self._expected, self._granted = self._granted, rows, None
            return rows
        if not stage.account.guarded:
            return rows
        if self.made:
            self.send()
        fits, reserved = stage.run.account.reserve_rows(stage.account, rows, self.sender.first, self.ticket)
        with self._lock:
            self._reserved += reserved
            self._expected += fits
        return fits

    def watched(self, items: list[Any]) -> list[Any]:
        """The same items, of which row i is made into ``made[i]``; an iteration may end before the last.

        It does where the next stage waits for what is finished; that is sent when the next iteration begins.
        """
        if self._channel is None or len(items) == 1 or items.__class__ is _Watched:
            return items
        return _Watched(items, self)

    def run_through(self, items: list[Any]) -> Iterator[Any]:
        """An iterator over the items, up to the one with which the next stage has what it waits for."""
        channel, made = self._channel, self.made
        assert channel is not None
        stop = len(items)
        if channel.demand < stop and not made:
            channel.nudge()  # quick rows are all done before it looks
        while True:
            self._rest = iter(items if stop >= len(items) else items[:stop])
            # Only now: whoever begins to wait after this look finds the iterator.
            wanted = channel.demand - (len(made) - self.sent)
            if wanted <= 0 and len(made) > self.sent:
                self.send()
            elif len(made) + max(1, wanted) >= stop:
                rest: Iterator[Any] = self._rest
                return rest
            else:
                stop = len(made) + max(1, wanted)

    def due(self) -> bool:
        """Whether the next stage waits for what is finished."""
        return self._channel is not None and len(self.made) - self.sent >= self._channel.demand

    def send(self, last: bool = False) -> None:
        """Send what is finished; ``last``: the unit is done."""
        start = perf_counter_ns()
        with self._lock:
            left, self._left = self._left, []
            out = self._finished(last)
            self._sending = True  # what is finished meanwhile must not overtake this
        for each in left:
            self.sender.send(self.ticket, each, False)
        if out is not None:
            self._send(out, last)
        elif last:
            self.sender.drop(self.ticket)
        self._sending = False
        self.away_ns += perf_counter_ns() - start

    def _send(self, out: Chunk, last: bool) -> None:
        if not isinstance(out, Bundle) or 1 < self.rows >= out.count:
            self.sender.send(self.ticket, out, last)
            return
        if self.rows == 1:
            ones = rows_of(out, self.stage.run.account)
            for index, one in enumerate(ones, 1):
                self.sender.send(self.ticket, one, last and index == len(ones))
            return
        count = out.count
        if out.buffers:
            self.stage.run.account.hold(out.buffers, -(-count // self.rows) - 1)
        for start in range(0, count, self.rows):
            stop = min(count, start + self.rows)
            self.sender.send(self.ticket, out.share(start, stop), last and stop == count)

    def offer_finished(self, needed: int) -> None:
        """Send what is finished if it is enough and there is room: in the next stage's thread, which never blocks."""
        with self._lock:
            if self._sending:
                return
            while self._left:  # nothing overtakes it, and the next stage may need no more
                if not self.sender.offer(self.ticket, self._left[0]):
                    return
                del self._left[0]
            finished = len(self.made) - self.sent
            if not max(1, needed) <= finished <= self.rows:
                # It ends here, in one step also for the thread that runs through it; that one looks at what is due.
                self._rest.__setstate__(sys.maxsize)
                return
            out = self._finished(False)
            if out is not None and (tracer := self.stage.run.tracer).on:
                tracer.sent(self.stage.name, out)
            if out is not None and not self.sender.offer(self.ticket, out):
                self._left.append(out)

    def _finished(self, last: bool) -> Chunk | None:
        """The finished rows that have not left, counted and measured; they are taken for sent."""
        start, stop = self.sent, len(self.made)
        self.sent = stop
        out = self.part(start, stop) if stop > start else None
        if self.rows == 1 and isinstance(out, Bundle) and out.count == 1:
            out = out.one(0)  # on its edge each is a chunk
        if last:
            self.made, self.sent = [], 0
        elif self.trims:
            del self.made[:stop]
            self.sent = 0
        stage, worker = self.stage, self.worker
        reserved = self._reserved
        if not last and self._expected > stop - start:
            reserved = reserved * (stop - start) // self._expected
        self._reserved -= reserved
        self._expected = max(0, self._expected - (stop - start))
        held: Buffers = ()
        if last:
            held, self._held = self._held, ()
        if out is None:
            stage.drop(reserved, held)
            return None
        count = len(out.lineages) if out.__class__ is not Bundle else out.count
        worker.leaving.items += count
        worker.leaving.samples += count
        settle(stage, worker, reserved, held, out)
        self.nbytes += out.nbytes
        return out

    def part(self, start: int, stop: int) -> Chunk | None:
        """The rows ``start`` to ``stop`` that were made, as they leave; None if none of them does."""
        raise NotImplementedError


class _Watched(list[Any]):
    """Items between which finished rows may leave; see :meth:`Unit.watched`."""

    def __init__(self, items: list[Any], unit: Unit) -> None:
        super().__init__(items)
        self._items = items
        self._unit = unit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)  # what a source knows of its indices

    def __iter__(self) -> Iterator[Any]:
        return self._unit.run_through(self._items)


def settle(stage: StageRun, worker: Worker, reserved: int, held: Buffers, out: Chunk) -> None:
    """Count what a call has made of what it was given."""
    if out.__class__ is not Bundle:
        stage.settle(worker, reserved, held, out)
        return
    assert isinstance(out, Bundle)
    if stage.pack is not None and out.packed is None and stage.pace.packs(out.count):
        out.pack(stage.pack)
    out.buffers = measured(out)
    if out.buffers:
        out.nbytes = sum([nbytes for _, nbytes in out.buffers])
        worker.leaving.nbytes += out.nbytes
    if out.buffers or reserved or held:
        stage.run.account.settle(stage.account, reserved, held, out.buffers, out.count)


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
        texts = [item for item in items if item.__class__ is str]
        return sum(map(sys.getsizeof, texts)) if max(map(len, texts)) <= SMALL_BYTES else None
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
