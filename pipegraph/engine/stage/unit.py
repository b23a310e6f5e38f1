"""A unit of work: a bundle in work, whose finished rows can be sent before the rest is done.

Finished rows are normally handed over together at the bundle's end. But no thread may wait for a finished row: the next
stage may be idle, and the row in work may be slow, or wait for something that only the consumer will do. So:

* before it begins with rows, the worker checks whether all workers of the next stage wait (``demand``); it then sends
  them the finished rows, or wakes one, which checks for itself;
* a thread that begins to wait sends finished rows itself (:meth:`Unit.offer_finished`), because the worker may be
  inside a function for long. If there are not enough, it ends the worker's iteration at the next row, and the worker
  checks again: it sends the rows if they are enough, else it continues up to the row that makes them enough.

Both publish their own change (the demand; the list) before they check, so one of them sees the other's. Between rows
the worker executes no code of its own: it iterates over a plain list, and another thread ends that by emptying it.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from pipegraph import concurrency
from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk
from pipegraph.engine.memory import Buffers
from pipegraph.engine.stage.bundle_size import LIGHT_ROW_BYTES
from pipegraph.engine.stage.row_intake import rows_of
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Worker
from pipegraph.tree import ATOMS, buffers_of_each

_nbytes = attrgetter("nbytes")
_bundle_ids = itertools.count(-1, -1)  # below all addresses
_PLAIN = ATOMS | {str}


class Unit:
    """One worker's unit of work. Only the worker appends to ``made``; rows are taken from it under ``_lock``.

    Attributes:
        made: one entry per finished row.
        sent: how many of them were taken to be sent.
    """

    trims = False
    """Whether sent rows are removed from ``made``, because the unit may have no end."""

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
        self._reserved = 0
        self._reserved_rows = 0  # unsent rows covered by the reservation
        self._held: Buffers = ()
        self._unsent: list[Chunk] = []  # taken by a thread of the next stage, which found no room for it
        self._lock = concurrency.Lock()
        self._sending = False
        self._granted: int | None = None  # bytes reserved for the whole unit before it began
        self._rows_in_work: list[Any] = []  # the worker runs through it; emptied to end that
        self._channel = self.sender.channels[0] if len(self.sender.channels) == 1 else None
        if self._channel is not None:
            self.sender.units.append(weakref.ref(self))

    def begin(self, ticket: int, held: Buffers = (), granted: int | None = None) -> None:
        """Begin another unit, made from the buffers ``held``, with ``granted`` bytes reserved for it."""
        with self._lock:
            self._granted = granted
            self.made, self.sent, self.ticket = [], 0, ticket
            self.nbytes = self._reserved = self._reserved_rows = 0
            self._held = held

    def reserve(self, rows: int) -> int:
        """Reserve memory for as many of the next rows as fit now; blocks until one does. Sends finished rows first."""
        stage = self.stage
        if self._granted is not None:
            with self._lock:
                self._reserved, self._reserved_rows, self._granted = self._granted, rows, None
            return rows
        if not stage.account.guarded:
            return rows
        if self.made:
            self.send()
        fits, reserved = stage.run.account.reserve_rows(stage.account, rows, self.sender.first, self.ticket)
        with self._lock:
            self._reserved += reserved
            self._reserved_rows += fits
        return fits

    def watched(self, items: list[Any]) -> list[Any]:
        """The items, in a list whose iteration may end early; the result of item i must become ``made[i]``.

        It ends when the next stage waits for finished rows; these are sent when the next iteration begins.
        """
        if self._channel is None or len(items) == 1 or items.__class__ is _Watched:
            return items
        return _Watched(items, self)

    def run_through(self, items: _Watched) -> Iterator[Any]:
        """An iterator over the items up to the one that satisfies the next stage's demand."""
        channel, made = self._channel, self.made
        assert channel is not None
        stop = len(items)
        if channel.demand < stop and not made:
            channel.nudge()  # if the rows are quick, all are done before it checks
        while True:
            rows = self._rows_in_work = items[:stop]
            # After publishing the list: a thread that begins to wait after this check finds it.
            wanted = channel.demand - (len(made) - self.sent)
            if wanted <= 0 and len(made) > self.sent:
                self.send()
            elif len(made) + max(1, wanted) >= stop:
                return iter(rows)
            else:
                stop = len(made) + max(1, wanted)

    def due(self) -> bool:
        """Whether the next stage waits for the finished rows."""
        return self._channel is not None and len(self.made) - self.sent >= self._channel.demand

    def send(self, last: bool = False) -> None:
        """Send finished rows; ``last``: the unit is done."""
        paused = self.worker.meter.pause()
        with self._lock:
            unsent, self._unsent = self._unsent, []
            out = self._finished(last)
            self._sending = True  # rows finished meanwhile must not overtake these
        for each in unsent:
            self.sender.send(self.ticket, each, False)
        if out is not None:
            self._send(out, last)
        elif last:
            self.sender.drop(self.ticket)
        self._sending = False
        self.worker.meter.resume(paused)

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
        """Send finished rows if they are enough and there is room. Called by the next stage's threads; never blocks."""
        with self._lock:
            if self._sending:
                return
            while self._unsent:  # first, in order; the next stage may need no more
                if not self.sender.offer(self.ticket, self._unsent[0]):
                    return
                del self._unsent[0]
            if not self._enough(needed):
                # End the worker's iteration; the worker then checks what is due. (Not by the iterator's state:
                # without the GIL, a ``next`` at the same time undoes it.) Look again: a row that was finished before
                # the end would wait for the one after it.
                self._rows_in_work.clear()
                if not self._enough(needed):
                    return
            out = self._finished(False)
            if out is not None and (tracer := self.stage.run.tracer).on:
                tracer.sent(self.stage.name, out)
            if out is not None and not self.sender.offer(self.ticket, out):
                self._unsent.append(out)

    def _enough(self, needed: int) -> bool:
        return max(1, needed) <= len(self.made) - self.sent <= self.rows

    def _finished(self, last: bool) -> Chunk | None:
        """Take the finished rows that were not sent, counted and measured; under ``_lock``."""
        start, stop = self.sent, len(self.made)
        self.sent = stop
        out = self.part(start, stop) if stop > start else None
        if self.rows == 1 and isinstance(out, Bundle) and out.count == 1:
            out = out.one(0)  # rows travel as chunks on this edge
        if last:
            self.made, self.sent, self._rows_in_work = [], 0, []
        elif self.trims:
            del self.made[:stop]
            self.sent = 0
        stage, worker = self.stage, self.worker
        reserved, rows = 0, self._reserved_rows
        if rows:
            reserved = self._reserved
            if not last and rows > stop - start:
                reserved = reserved * (stop - start) // rows
            self._reserved -= reserved
            self._reserved_rows = max(0, rows - (stop - start))
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
        """The finished rows ``start`` to ``stop`` as one chunk to send; None if all were dropped."""
        raise NotImplementedError


class _Watched(list[Any]):
    """A list whose iteration may end early; see :meth:`Unit.watched`."""

    def __init__(self, items: list[Any], unit: Unit) -> None:
        super().__init__(items)
        self._items = items
        self._unit = unit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)  # attributes of a source's own sequence of indices

    def __iter__(self) -> Iterator[Any]:
        return self._unit.run_through(self)


def settle(stage: StageRun, worker: Worker, reserved: int, held: Buffers, out: Chunk) -> None:
    """Account for the result of a call."""
    if out.__class__ is not Bundle:
        stage.settle(worker, reserved, held, out)
        return
    assert isinstance(out, Bundle)
    if stage.pack is not None and out.packed is None and stage.pace.packs(out.count):
        out.pack(stage.pack, stage.batches_of(out))
    out.buffers = measured(out)
    if out.packed is None and stage.name not in stage.run.sized:
        stage.check_sized(out.data[0])
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
    # Not the bundle's id: a part of the bundle may outlive it, and a new bundle may get the same id.
    return ((next(_bundle_ids), nbytes),) if nbytes else ()


def _light(items: Any) -> int | None:
    """The total bytes of small values of one type; None if they must be measured one by one, as larger ones must,
    which samples may share."""
    kinds = set(map(type, items))
    if kinds <= ATOMS:
        return 0
    if kinds <= _PLAIN:
        texts = [item for item in items if item.__class__ is str]
        return sum(map(sys.getsizeof, texts)) if max(map(len, texts)) <= LIGHT_ROW_BYTES else None
    if len(kinds) > 1:
        return None
    kind = kinds.pop()
    if kind is np.ndarray or kind is torch.Tensor:
        if kind is np.ndarray and any(item.dtype.hasobject for item in items):
            return None
        try:
            sizes = list(map(_nbytes, items))
        except RuntimeError:  # a sparse tensor has no bytes of its own
            return None
        return sum(sizes) if max(sizes) <= LIGHT_ROW_BYTES else None
    if kind is bytes:
        sizes = list(map(len, items))
        return sum(sizes) if max(sizes) <= LIGHT_ROW_BYTES else None
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
