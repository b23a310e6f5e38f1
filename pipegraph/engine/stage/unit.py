"""A unit of work: a bundle in work. Its finished rows are handed over together, at its end."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from operator import attrgetter
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

_nbytes = attrgetter("nbytes")
_bundle_ids = itertools.count(-1, -1)  # below all addresses
_PLAIN = ATOMS | {str}


class Unit:
    """One worker's unit of work.

    Attributes:
        made: one entry per finished row.
        sent: how many of them were sent.
    """

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
        self._held: Buffers = ()

    def begin(self, ticket: int, held: Buffers = ()) -> None:
        """Begin another unit, made from the buffers ``held``."""
        self.made, self.sent, self.ticket = [], 0, ticket
        self.nbytes, self._held = 0, held

    def send(self, last: bool = False) -> None:
        """Send finished rows; ``last``: the unit is done."""
        paused = self.worker.meter.pause()
        out = self._finished(last)
        if out is not None:
            self._send(out, last)
        elif last:
            self.sender.drop(self.ticket)
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

    def _finished(self, last: bool) -> Chunk | None:
        """Take the finished rows that were not sent, counted and measured."""
        start, stop = self.sent, len(self.made)
        self.sent = stop
        out = self.part(start, stop) if stop > start else None
        if self.rows == 1 and isinstance(out, Bundle) and out.count == 1:
            out = out.one(0)  # rows travel as chunks on this edge
        if last:
            self.made, self.sent = [], 0
        stage, worker = self.stage, self.worker
        held: Buffers = ()
        if last:
            held, self._held = self._held, ()
        if out is None:
            stage.run.account.release(held)
            return None
        count = len(out.lineages) if out.__class__ is not Bundle else out.count
        worker.meter.items += count
        worker.meter.samples += count
        settle(stage, worker, held, out)
        self.nbytes += out.nbytes
        return out

    def part(self, start: int, stop: int) -> Chunk | None:
        """The finished rows ``start`` to ``stop`` as one chunk to send; None if all were dropped."""
        raise NotImplementedError


def settle(stage: StageRun, worker: Worker, held: Buffers, out: Chunk) -> None:
    """Account for the result of a call."""
    if out.__class__ is not Bundle:
        stage.settle(worker, held, out)
        return
    assert isinstance(out, Bundle)
    if stage.pack is not None and out.packed is None and stage.pace.packs(out.count):
        out.pack(stage.pack, stage.batches_of(out))
    out.buffers = measured(out)
    if out.buffers:
        out.nbytes = sum([nbytes for _, nbytes in out.buffers])
        worker.meter.nbytes += out.nbytes
    if out.buffers or held:
        stage.run.account.settle(held, out.buffers)


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
