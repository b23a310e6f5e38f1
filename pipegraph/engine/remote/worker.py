"""The worker in a worker process: has the operator of its stage and serves the trainer's calls, one at a time.

What it makes is what a thread's worker makes; policies are applied in the trainer. Before each row it writes the row's
number and the time to a page that the trainer can read, so that a death or a deadline is blamed on the right row. For a
failed bundle it returns the results before the failure.
"""

from __future__ import annotations

import mmap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import torch

from pipegraph.bundle import UNNAMED, Bundle, Pack, named
from pipegraph.chunk import Chunk, Lineage
from pipegraph.contracts import Context, Drawn, Regroup
from pipegraph.engine.remote.contract import NOTHING as NOTHING
from pipegraph.engine.remote.exceptions import Carried
from pipegraph.engine.stage.bundle_size import BATCHES_BYTES, Waits
from pipegraph.engine.stage.failure_notes import checked
from pipegraph.global_generators import Draws, drawing, drew_unseeded
from pipegraph.tree import buffers

PAGE = 16
"""Bytes of the page: row in work, its start time (``monotonic_ns``)."""

PULL_NS = 2_000_000
"""Items of a source, or of an expanding operator, are sent after this time, or in groups of ``PULL``."""

PULL = 64
"""Maximum number of items sent together: those between two snapshots of a source (``SNAPSHOT_EVERY``)."""

PACKED_BYTES = 32 << 10
"""Rows up to this size are packed before they are sent; for larger ones the copy costs more than it saves."""


class Page:
    """The row in work and its start time, in shared memory: written by the worker, read by the trainer."""

    def __init__(self, fd: int) -> None:
        self._words = memoryview(mmap.mmap(fd, PAGE)).cast("q")

    def begin(self, row: int) -> None:
        self._words[1] = time.monotonic_ns()
        self._words[0] = row

    def look(self) -> tuple[int, int]:
        """``(row, start time in monotonic ns)``."""
        return self._words[0], self._words[1]


class Made(list[object]):
    """A list of results that records the next row on the page with each append."""

    def __init__(self, page: Page, start: int) -> None:
        super().__init__()
        self._page = page
        self._next = start

    def append(self, item: object) -> None:
        list.append(self, item)
        self._next += 1
        self._page.begin(self._next)


def _needs_grad(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


class OperatorCounts:
    """The counts of an operator since the last answer, by name."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, n: int) -> None:
        self._counts[name] += n

    def take(self) -> dict[str, int]:
        counts, self._counts = self._counts, Counter()
        return dict(counts)


Worked = tuple[Any, Carried | None, list[Any] | None]
"""Results, the error that ended them, and the keys from the first row on, where the trainer does not know them."""


Pulled = tuple[list[object], bool, Carried | None, object]
"""Items, whether these were the last, the error that ended them, and a source's snapshot."""


Expanded = tuple[list[int], Any, Sequence[Lineage], list[Any] | None, Pulled | None]
"""How many children each of the first chunks has, all of these as in :data:`Worked`, their lineages, their keys as of a
``Bundle``, and the first children of the next chunk, if it has more or has failed."""


class Regrouped(NamedTuple):
    """The answer to :meth:`ProcessWorker.regroup`.

    Attributes:
        made: what the operator made.
        error: what it raised.
        failing: the chunks that have failed, without their data; none: the one it was given.
    """

    made: Any
    error: Carried | None = None
    failing: Sequence[Chunk] = ()


def unsent(result: object, error: Exception) -> Carried | Regrouped:
    """The answer in place of a result that cannot be sent: a group that is lost so was made of other samples too."""
    carried = Carried(error)
    if not isinstance(result, Regrouped):
        return carried
    made = result.made if isinstance(result.made, list | tuple) else [result.made]
    return Regrouped(None, carried, [each.replace(None) for each in made if isinstance(each, Chunk)])


class ProcessWorker:
    """Serves the trainer's calls: the trainer calls these methods by name; see ``base_proxy``.

    Args:
        page: records which row is in work.
        pack: packs rows as the next ``Batch`` needs them; None if there is none.
    """

    def __init__(self, page: Page, operator: Any, context: Context, pack: Pack | None = None) -> None:
        self._page = page
        self._operator = operator
        self._draws = Draws(context.seed, context.stage)
        self._stage = context.stage
        self._own, self._blocks = operator.traits.seeds_itself, operator.traits.blocks
        self._pack = pack
        self._batch: Any = None
        self._broken: BaseException | None = None
        self._items: Iterator[object] = iter(())
        self._waits = Waits()
        operator.open(context)

    # -- one-to-one ----------------------------------------------------------------------------

    def work(self, block: Chunk, start: int, stop: int) -> Worked:
        """Do a chunk, or rows of a bundle: ``(results, the error that ended it)``; a row without either is asked for
        again."""
        if not isinstance(block, Bundle):
            self._draws.one(block.epoch, block.lineages[0])
            return self._do(
                0,
                lambda made: made.append(checked(self._operator.process(block), self._operator, self._stage)),
            )
        rows = block if stop == block.count else block.part(0, stop)
        names = None
        if rows.packed is not None:
            rows.unpack()
            if rows.names is not None and any(name is not UNNAMED for name in rows.names):
                names = rows.names[start:]
        made, error, _ = self._do(start, lambda made: self._operator.work_into(made, rows, start))
        return made, error, names

    def read(self, indices: list[object], start: int, stop: int) -> Worked:
        """As :meth:`work`, of a source."""
        if not self._blocks:
            return self._do(start, lambda made: self._read(made, indices[start:stop]))
        return self._do(start, lambda made: self._operator.read_into(made, indices[:stop], start))

    def _do(self, start: int, work: Callable[[Made], None]) -> Worked:
        made = Made(self._page, start)
        try:
            work(made)
        except BaseException as error:
            return list(made), None if drew_unseeded() else Carried(error), None
        return self._packed(made), None, None

    def _read(self, made: list[object], places: list[Any]) -> None:
        for place, epoch in places:
            position = place.position if isinstance(place, Drawn) else place
            if not self._own:
                self._draws.one(epoch, (self._stage, int(position)))
            made.append(self._operator.read(place, epoch))

    def _packed(self, made: list[object]) -> object:
        """Rows as packed by their ``Batch``, with one array per field to send; unchanged if they cannot be packed."""
        if self._pack is None or len(made) < 2 or sum([n for _, n in buffers(made[0])]) > PACKED_BYTES:
            return list(made)
        packed = self._pack(made)
        if packed is None or any(map(_needs_grad, packed.leaves())):
            return list(made)
        return packed

    # -- rows of a batch -----------------------------------------------------------------------

    def begin_batch(self, chunk: Chunk) -> None:
        """Begin a batch, or begin it anew; it stays here, and its rows."""
        self._batch, self._broken = (chunk, chunk.row_lineages, self._operator.begin_batch(chunk)), None

    def rows(self, at_once: bool, first: int, start: int, stop: int, without: set[int]) -> Worked:
        """Do rows of the batch: ``(one entry for each from ``start`` on that was done, the error that ended it)``.

        Args:
            at_once: whether the operator may do them together first.
            first: the row from which on they are not done yet, except those ``without``.
        """
        chunk, lineages, batch = self._batch
        if at_once:
            self._page.begin(NOTHING)
            with suppress(Exception):  # row by row it comes again, and is that row's
                self._operator.do_rows(batch, start, stop)
        for index in range(first, stop):
            if index in without:
                continue
            self._page.begin(index)
            self._draws.one(chunk.epoch, lineages[index])
            try:
                self._operator.do_row(batch, index)
            except BaseException as error:
                if index >= start:
                    return [None] * (index - start), Carried(error), None
                self._broken = error  # it was done before, in a process that has died
        return [None] * (stop - start), None, None

    def end(self, kept: list[int]) -> object:
        """The finished batch."""
        (_, _, batch), self._batch = self._batch, None
        if self._broken is not None:
            raise self._broken
        return self._operator.end_batch(batch, kept)

    # -- one to many, and sources that are read in sequence ------------------------------------

    def expand(self, chunk: Chunk, drop: int) -> Pulled:
        """Begin an item: its first children, after ``drop`` of them. Returns as :meth:`more`."""
        process = self._operator.process
        made = (process if self._own else drawing(process, self._draws))(chunk)
        return self._begin(islice(made, drop, None), PULL if self._waits.alone is False else 1)

    def expand_all(self, parents: Bundle) -> Expanded:
        """Expand chunks up to the first that has more children than are sent together, or has failed, or until
        they have ``BATCHES_BYTES``."""
        counts: list[int] = []
        found: list[Any] = []
        first = None
        for index in range(parents.count):
            first = self.expand(parents.one(index), 0)
            children, ended, error, _ = first
            plain = all(isinstance(child, Chunk) and Bundle.takes(child) for child in children)
            if not ended or error is not None or not plain:
                break
            counts.append(len(children))
            found += children
            first = None
            if found and len(found) * sum([n for _, n in buffers(found[0].data)]) > BATCHES_BYTES:
                break
        if not found:
            return counts, [], (), None, first
        bundle = Bundle.of(found)
        return counts, self._packed(bundle.data), bundle.lineages, named(bundle.data, bundle.names), first

    def iterate(
        self,
        epoch: int,
        rank: int,
        world_size: int,
        step: int,
        snapshot: tuple[int, object] | None,
        run: tuple[int, object] | None,
    ) -> Pulled:
        """Begin an epoch of a source that is read in sequence at a step, from a snapshot taken there if one is given.

        Returns as :meth:`more`: the first item alone.

        Args:
            run: the arguments of ``begin_run``, if this worker has not had them.
        """
        if run is not None:
            self._operator.begin_run(*run)
        if snapshot is not None:
            self._operator.restore(*snapshot)
        items = iter(self._operator.iterate(epoch, rank, world_size, step))
        self._page.begin(0)
        return self._begin(items if self._own else self._draws.each(items, epoch, (self._stage,), step), 1)

    def _begin(self, items: Iterator[object], most: int) -> Pulled:
        self._items = items
        return self._pull(most, None)

    def more(self, most: int) -> Pulled:
        """The next items."""
        return self._pull(most, time.monotonic_ns())

    def _pull(self, most: int, last_ns: int | None) -> Pulled:
        """As :meth:`more`; ``last_ns``: when the item before was finished, None before the first."""
        found: list[object] = []
        start = time.monotonic_ns()
        try:
            for item in self._items:
                found.append(item)
                now = time.monotonic_ns()
                self._page.begin(len(found))
                if last_ns is not None:
                    self._waits.note(1, now - last_ns)
                last_ns = now
                if len(found) >= most or now - start > PULL_NS or self._waits.alone:
                    break
            else:
                if last_ns is not None:
                    self._waits.note(0, time.monotonic_ns() - last_ns)
                return found, True, None, None
        except BaseException as error:
            return found, True, Carried(error), None
        return found, False, None, self._operator.snapshot() if self._operator.traits.resumable else None

    # -- operators that hold data --------------------------------------------------------------

    def invoke(self, name: str, *args: object) -> object:
        """Call any method; a lazy result is returned as a list."""
        if self._own:
            pass
        elif args and isinstance(args[0], Chunk):
            self._draws.one(args[0].epoch, args[0].lineages[0])
        elif name == "flush":
            self._draws.end()
        made = getattr(self._operator, name)(*args)
        return list(made) if isinstance(made, Iterator) else made

    def regroup(self, name: str, *args: object) -> Regrouped:
        """As :meth:`invoke`, of ``process`` or ``flush``."""
        if isinstance(self._operator, Regroup):
            self._operator.failing = ()
        try:
            return Regrouped(self.invoke(name, *args))
        except BaseException as error:
            failing = [each.replace(None) for each in getattr(self._operator, "failing", ())]
            return Regrouped(None, Carried(error), failing)

    def close(self) -> None:
        self._items = iter(())
        self._operator.close()
