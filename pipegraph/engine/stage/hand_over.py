"""Hands over what a worker has made: measured, counted, and in bundles as large as its edge takes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, Failure
from pipegraph.engine.memory import Account, Buffers
from pipegraph.engine.stage.bundle_size import LIGHT_ROW_BYTES
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Worker
from pipegraph.tree import ATOMS, buffers, buffers_of_each

_nbytes = attrgetter("nbytes")
_bundle_ids = itertools.count(-1, -1)  # below all addresses
_PLAIN = ATOMS | {str}


def rows_of(bundle: Bundle, account: Account) -> list[Chunk]:
    """The samples of a bundle as chunks, each accounted with its own buffers."""
    ones = [bundle.one(index) for index in range(bundle.count)]
    if bundle.buffers:
        for one in ones:
            one.buffers = buffers(one.data)
            one.nbytes = sum([nbytes for _, nbytes in one.buffers])
        account.exchange(bundle.buffers, [one.buffers for one in ones])
    return ones


def hand_over(
    stage: StageRun,
    worker: Worker,
    ticket: int,
    out: Chunk | Failure | None,
    held: Buffers = (),
    last: bool = True,
    more: bool = False,
) -> int:
    """Count and send what a worker has made, as its edge takes it; returns its bytes.

    Args:
        out: a bundle, a chunk or a failure; None if nothing is left of it.
        held: the buffers that it was made from, released now.
        last: whether it is the ticket's last result.
        more: as for ``Sender.send``.
    """
    account, sender = stage.run.account, stage.sender
    if not isinstance(out, Chunk):
        account.release(held)
        if out is not None:
            sender.send(ticket, out, last)
        elif last:
            sender.drop(ticket)
        return 0
    rows, count = stage.plan.bundle_rows, out.count
    if rows == 1 == count and isinstance(out, Bundle):
        out = out.one(0)  # rows travel as chunks on this edge
    worker.meter.items += count
    worker.meter.samples += count if isinstance(out, Bundle) else len(out.lineages)
    if held or out.__class__ is not Chunk or out.data.__class__ not in ATOMS:
        settle(stage, worker, held, out)
    nbytes: int = out.nbytes
    if not isinstance(out, Bundle) or 1 < rows >= count:
        sender.send(ticket, out, last, more)
    elif rows == 1:
        ones = rows_of(out, account)
        for index, one in enumerate(ones, 1):
            sender.send(ticket, one, last and index == count)
    else:
        if out.buffers:
            account.hold(out.buffers, -(-count // rows) - 1)
        for start in range(0, count, rows):
            stop = min(count, start + rows)
            sender.send(ticket, out.share(start, stop), last and stop == count)
    return nbytes


def settle(stage: StageRun, worker: Worker, held: Buffers, out: Chunk) -> None:
    """Measure and count the buffers of a result, and release those that it was made from."""
    if isinstance(out, Bundle):
        if stage.pack is not None and out.packed is None and stage.pace.packs(out.count):
            out.pack(stage.pack, batches_of(stage, out))
        out.buffers = measured(out)
    else:
        out.buffers = buffers(out.data)
    out.nbytes = sum([nbytes for _, nbytes in out.buffers])
    worker.meter.nbytes += out.nbytes
    if out.buffers or held:
        stage.run.account.settle(held, out.buffers)


def batches_of(stage: StageRun, bundle: Bundle) -> list[tuple[int, int]]:
    """From where to where each batch of the next ``Batch`` lies in a bundle of a source's consecutive steps."""
    if bundle.places is not None or bundle.count <= 1:
        return [(0, bundle.count)]
    first = stage.restart.step if bundle.epoch == stage.run.first_epoch else 0
    return stage.pace.groups(bundle.before - first, bundle.count)


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


def _all_light(columns: Iterable[object]) -> int | None:
    found = 0
    for column in columns:
        nbytes = _light(column)
        if nbytes is None:
            return None
        found += nbytes
    return found
