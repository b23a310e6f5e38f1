"""Reads blocks of shards ahead of their use, shared by a stage's workers, within a memory budget.

Every block that is in use, loaded or on its schedule is an entry of one table under one lock. Workers take
blocks from it and wait for missing ones; fetch threads load what is waited for, else read ahead in the order of first
use as far as the budget allows; a scheduler thread finds out what that order is. What was not read ahead is loaded
when a worker asks for it: the schedule affects timing, never data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from pipegraph import concurrency
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.remote.exceptions import copied
from pipegraph.errors import LoaderClosedError
from pipegraph.reader.block_sources import BlockSource
from pipegraph.reader.block_table import BlockEntry, BlockState, BlockTable
from pipegraph.reader.schedule import FETCHERS, RankSteps, ReadSchedule, Uses
from pipegraph.storage.formats.shard_format import BlockSamples


class BlockReader:
    """The blocks of one stage, for all of its workers.

    Thread-safe.
    """

    def __init__(
        self,
        source: BlockSource,
        ahead: bool,
        count: Callable[[str, int], None],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._source, self._ahead = source, ahead
        self._count, self._clock = count, clock
        self._lock = concurrency.Lock()
        self._arrived = concurrency.Condition(self._lock)  # workers wait for blocks
        self._work = concurrency.Condition(self._lock)  # fetchers wait for orders
        self._planning = concurrency.Condition(self._lock)  # the scheduler waits until more is to be known
        self._table = BlockTable(source)
        self._queue: deque[BlockEntry] = deque()
        self._cancelled = self._closed = False
        self._threads: list[concurrency.Thread] = []
        self._steps = ReadSchedule(source.stride)
        self._waiting, self._since = 0, 0.0  # workers that wait, and since when one of them does
        if source.fetched:
            for number in range(FETCHERS):
                self._begin_thread(self._fetch, f"fetch-{number}")
            # Without preloading too: what is known of the next uses decides what goes.
            self._begin_thread(self._schedule, "preload")

    def _begin_thread(self, run: Callable[[], None], name: str) -> None:
        thread = concurrency.Thread(target=run, name=f"pipegraph-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # -- what will be read -----------------------------------------------------------------------

    def new_run(self) -> None:
        """Forget the deals so far; loaded blocks stay."""
        with self._lock:
            self._steps = ReadSchedule(self._source.stride)
            for entry in self._queue:
                self._table.drop(entry)
            self._queue.clear()
            for entry in self._table:
                entry.first, entry.awaited = -1, False
            self._replan()

    def dealt(self, deal: RankSteps) -> None:
        """Append an epoch's steps behind those of the deal before."""
        with self._lock:
            self._steps.add(deal)
            for entry in self._table:
                # Errors of finished epochs are not requested again.
                entry.raised_at = {at for at in entry.raised_at if at[0] >= deal.epoch - 1}
            self._replan()

    # -- workers ---------------------------------------------------------------------------------

    def sample(self, number: int, index: int, epoch: int, step: Any) -> dict[str, Any]:
        """A copy of sample ``index`` of a block; blocks until it is there.

        Raises as :meth:`acquire`.
        """
        entry = self.acquire(number, epoch, step)
        try:
            return dict(entry.value[index])
        finally:
            self.release(entry)

    def together(self, form: str, numbers: Any, indices: Any, epoch: int, steps: Sequence[Any]) -> Any:
        """Samples of several blocks, each block acquired once; None where one has none in this form.

        Args:
            form: ``"columns"`` or ``"encoded"``: the method of ``BlockSamples`` that gives a block's.
            numbers, indices: int64 (samples,): of their blocks, and in these.
            steps: for which each is wanted.

        Raises as :meth:`acquire`.
        """
        order = np.argsort(numbers, kind="stable")
        ends = np.flatnonzero(np.diff(numbers[order])) + 1
        parts = []
        for places in np.split(order, ends):
            entry = self.acquire(int(numbers[places[0]]), epoch, steps[int(places[0])])
            try:
                value = entry.value
                part = getattr(value, form)(indices[places]) if isinstance(value, BlockSamples) else None
            finally:
                self.release(entry)
            if part is None:
                return None
            parts.append(part)
        found = parts[0].joined(parts)
        if found is None or len(parts) == 1:
            return found
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        return found.take(inverse)

    def acquire(self, number: int, epoch: int, step: Any) -> BlockEntry:
        """A loaded block, which stays until :meth:`release`; blocks until it is there. ``step``: for which it is
        wanted, if known.

        Raises:
            Cancelled: the run is over.
            Exception: what its loading raised; asked for again for the same step, it is loaded again.
        """
        with self._lock:
            self._reached(epoch, step)
            entry = self._table.get(number)
            if entry is not None and entry.state is BlockState.READY and not self._cancelled:
                return self._use(entry)
        entry = self._wait_for(number, epoch, step)
        self._sweep()
        return entry

    def release(self, entry: BlockEntry) -> None:
        """The end of a use."""
        with self._lock:
            entry.pins -= 1

    def _use(self, entry: BlockEntry) -> BlockEntry:
        self._table.use(entry)
        if entry.fresh:
            entry.fresh = False
            self._replan()  # one block less is ahead
        return entry

    def _reached(self, epoch: int, step: Any) -> None:
        """Note how far the epoch has come."""
        if step.__class__ is int and self._steps.reached(epoch, step):
            self._replan()

    def _wait_for(self, number: int, epoch: int, step: Any) -> BlockEntry:
        waits = False
        with self._lock:
            try:
                while True:
                    if self._cancelled or self._closed:
                        raise Cancelled
                    entry = self._table.get(number)
                    if entry is None:
                        entry = self._table.add(number, self._steps.tick)
                        if self._source.fetched:
                            self._await(entry)
                            self._queue.appendleft(entry)
                            self._work.notify()
                        else:
                            self._load(entry)
                            continue
                    elif entry.state is BlockState.READY:
                        return self._use(entry)
                    elif entry.state is BlockState.FAILED:
                        assert entry.error is not None
                        if (epoch, step) not in entry.raised_at:
                            entry.raised_at.add((epoch, step))
                            # Notes that one sample's error gets must not show at the others.
                            raise copied(entry.error)
                        self._table.drop(entry)
                        continue
                    elif entry.state is BlockState.WAITING and not entry.awaited:
                        self._queue.remove(entry)  # it is late: load it before all others
                        self._queue.appendleft(entry)
                        self._await(entry)
                        self._work.notify()
                    else:
                        self._await(entry)
                    if not waits:
                        waits = True
                        self._since = self._since if self._waiting else self._clock()
                        self._waiting += 1
                    entry.pins += 1  # it must not be evicted before it was read
                    try:
                        self._arrived.wait()
                    finally:
                        entry.pins -= 1
            finally:
                if waits:
                    self._waiting -= 1
                    if not self._waiting:  # of several at once, what the longest one waited
                        self._count("waits for blocks", 1)
                        self._count("us waited for blocks", round((self._clock() - self._since) * 1e6))

    def _await(self, entry: BlockEntry) -> None:
        entry.awaited = True
        entry.first = min(entry.first, self._steps.tick)

    # -- loading ---------------------------------------------------------------------------------

    def _load(self, entry: BlockEntry) -> None:
        """Load one block. Called with the lock held, which is released meanwhile."""
        self._table.begin(entry, self._steps)
        try:
            self._lock.release()  # here: a Ctrl-C may follow
            self._sweep()  # what made room
            entry.file, entry.value = self._source.open(entry.number, partial(self._grow, entry))
        except LoaderClosedError:
            pass
        except Exception as caught:
            entry.error = caught
        finally:
            self._lock.acquire()
            if entry.value is not None or entry.file is not None:
                self._table.loaded(entry, self._steps)
                self._count("blocks loaded", 1)
                if self._source.fetched:
                    self._count("blocks late", int(entry.awaited and not self._steps.in_cold_start))
            else:
                # Without an error: the reader closes, or an inline worker was interrupted.
                self._table.failed(entry)
            self._arrived.notify_all()
            self._replan()

    def _grow(self, entry: BlockEntry, nbytes: int) -> None:
        """Record how many bytes a running load holds now.

        Others go for it. What is beyond the budget while several grow at once is being worked on, as a sample is in a
        worker; alone no block may be larger.
        """
        with self._lock:
            if self._closed:
                raise LoaderClosedError("the pipeline was closed while a block was read")
            if nbytes > self._source.budget():
                raise self._source.too_large(entry.number)
            self._table.grow(entry, nbytes, self._steps)

    def _fetch(self) -> None:
        """Body of a fetch thread."""
        while True:
            with self._lock:
                while (entry := self._next_load()) is None:
                    if self._closed:
                        return
                    self._work.wait()
                self._replan()  # there may be room for more
                self._load(entry)
            self._sweep()

    def _next_load(self) -> BlockEntry | None:
        """The block to load now: what workers wait for, else the next one that there is room for."""
        if self._closed:
            return None
        if self._queue:
            return self._queue.popleft() if self._table.may_begin(self._queue[0]) else None
        return self._table.next_start(self._steps) if self._ahead and not self._cancelled else None

    def _sweep(self) -> None:
        """Close released files, outside the lock."""
        if not self._table.doomed:
            return
        with self._lock:
            doomed, self._table.doomed = self._table.doomed, []
        for file in doomed:
            file.close()

    # -- the schedule ----------------------------------------------------------------------------

    def _replan(self) -> None:
        """Something has changed: more may be to be known, or loaded; called with the lock held."""
        self._planning.notify()
        self._work.notify()

    def _schedule(self) -> None:
        """Body of the scheduler's thread."""
        while True:
            with self._lock:
                while not self._closed and self._steps.next_draw() is None:
                    self._planning.wait()
                schedule = self._steps
                draw = schedule.next_draw()
                if self._closed or draw is None:
                    return
            uses = Uses.of(draw.deal.blocks(draw.first, draw.last), draw.base + draw.first)
            with self._lock:
                schedule.merge(uses, draw.base + draw.last, self._table)
                self._work.notify()

    # -- the end ---------------------------------------------------------------------------------

    def cancel(self) -> None:
        """End every wait of a worker with ``Cancelled``, and all later ones; loads continue."""
        with self._lock:
            self._cancelled = True
            self._arrived.notify_all()

    def uncancel(self) -> None:
        """Workers may wait again."""
        with self._lock:
            self._cancelled = False
            self._replan()

    def close(self) -> None:
        """End every thread and close every file."""
        with self._lock:
            self._closed = True
            for condition in (self._arrived, self._work, self._planning):
                condition.notify_all()
        self._source.close()
        for thread in self._threads:
            thread.join()
        with self._lock:  # a worker may be about to use one
            for entry in self._table:
                if entry.state is not BlockState.FAILED:
                    self._table.drop(entry)
        self._sweep()
