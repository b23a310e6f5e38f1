"""Sources of whole batches, as torch's fetchers make them, their indices, and the fan-in that merges the workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, final

import torch
from torch.utils.data import _DatasetKind
from torch.utils.data._utils.pin_memory import pin_memory

from pipegraph import concurrency
from pipegraph.contracts import Context, Drawn, Source, Traits
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.remote.exceptions import Carried
from pipegraph.global_generators import Draws
from pipegraph.loader.torch_dataloader.batch_progress import Remaining
from pipegraph.loader.torch_dataloader.dataset_worker import DatasetWorker, become_worker, own_copy
from pipegraph.loader.torch_dataloader.fetching import Fetching, begun, restore_copy, where, where_copy

STAGE = "worker-{}"
"""Stages of workers that have indices of their own."""


_END = object()


class IndexFeed:
    """Batch indices, dealt in turn to ``shares`` workers, whose threads take them.

    The consumer's thread draws them, as torch's does, so that samplers are called there and as far ahead.
    """

    def __init__(self, shares: int) -> None:
        self._count = shares
        self._cancelled = False
        self._shares: list[concurrency.SimpleQueue[Any]] = []
        self._over = True

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexFeed, (self._count,)  # a worker's process is sent its indices one by one

    def restart(self, indices: Iterator[Any], remaining: Remaining) -> None:
        """The indices of another epoch's ``remaining`` batches follow; the epoch before has no more."""
        self.end()
        self._indices = indices
        self.remaining = remaining
        self._shares = [concurrency.SimpleQueue() for _ in range(self._count)]
        self._turn = remaining.first % self._count
        self._over = False

    def draw(self) -> None:
        """Draw the next index, if there is one."""
        if not self._over:
            try:
                self._shares[self._turn].put(next(self._indices))
                self._turn = (self._turn + 1) % self._count
            except StopIteration:
                self.end()

    def end(self) -> None:
        """The epoch has no more indices; thread-safe."""
        self._over = True
        for share in self._shares:
            share.put(_END)

    def indices_of(self, worker: int) -> Iterator[Any]:
        """The indices of one worker, in their order; may block."""
        share = self._shares[worker]
        while not self._cancelled and (index := share.get()) is not _END:
            yield index
        if self._cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """End an ``indices_of`` that blocks with ``Cancelled``; thread-safe."""
        self._cancelled = True
        self.end()

    def uncancel(self) -> None:
        self._cancelled = False


class Failed:
    """In place of a batch: the error that it met."""

    def __init__(self, error: Exception) -> None:
        self.error = Carried(error)


@final
@dataclass(eq=False)
class Stateful:
    """A batch, and the state of its worker's copy of the dataset behind it."""

    worker: int
    data: Any
    state: Any


@dataclass(eq=False)
class _Batches(Source):
    """What the two sources share.

    Attributes:
        worker: as whom a process fetches; None fetches in threads, each with a copy of the dataset.
        resume: of each worker, batches delivered and the state behind them; empty where copies have no states.
    """

    fetching: Fetching
    worker: DatasetWorker | None
    resume: Sequence[Any]

    name = "batches"
    traits = Traits(
        seeds_itself=True,
        trusted=True,
        one_world_size=True,
        splits_itself=True,
        inherits=True,
        sent_as="batches",
    )
    gives = "batch"

    _context = Context("")
    _draws = Draws()
    _ready = False

    def config(self) -> dict[str, Any]:
        return self.fetching.config()

    def open(self, context: Context) -> None:
        self._context = context
        self._draws = Draws(context.seed, context.stage)
        if self.worker is None:
            self.fetching = replace(self.fetching, dataset=own_copy(self.fetching.dataset))

    @property
    def number(self) -> int:
        """Which of the loader's workers this is."""
        stem, _, number = self._context.stage.rpartition("-")
        return int(number) if f"{stem}-{{}}" == STAGE else self._context.worker

    def _set_up(self) -> None:
        """At the first batch, and so in the worker's process and not in the trainer's."""
        if not self._ready and self.worker is not None:
            allocate = self._context.allocate
            assert allocate is not None
            become_worker(replace(self.worker, number=self.number), self.fetching.dataset, allocate)
        self._ready = True


@dataclass(eq=False)
class MapBatches(_Batches):
    """Batches of a map-style dataset, for one of ``shares`` stages that fetch in turn.

    Attributes:
        batches: in an epoch; None if that is not known.
    """

    feed: IndexFeed
    batches: int | None
    shares: int = 1
    share: int = 0
    _fetcher: Any = field(default=None, init=False)

    traits = replace(_Batches.traits, waits=True, sampled=True)
    random_access = True

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        return None if self.batches is None else len(range(self.share, self.batches, self.shares))

    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[Drawn]:
        for step, index in enumerate(self.feed.indices_of(self.share)):
            if step >= start:
                yield Drawn(self._position(step), index)

    def positions_of(self, steps: range, epoch: int, rank: int, world_size: int) -> Iterable[int]:
        return map(self._position, steps)

    def _position(self, step: int) -> int:
        """A batch's number in its epoch, also in a resumed one: random numbers are drawn by it."""
        return self.feed.remaining.number(step * self.shares + self.share)

    def cancel(self) -> None:
        self.feed.cancel()

    def uncancel(self) -> None:
        self.feed.uncancel()

    def read(self, position: Any, epoch: int) -> Any:
        try:
            self._set_up()
            data = self._fetch(position.index, epoch, position.position)
        except Exception as error:
            data = Failed(error)
        if not self.resume:
            return data
        return Stateful(self.number, data, where_copy(self.fetching.dataset))

    def _fetch(self, index: Any, epoch: int, position: int) -> Any:
        stage, draws, dataset = self._context.stage, self._draws, self.fetching.dataset
        if self.worker is None:  # a process's numbers are its own, as those of torch's workers are
            draws.one(epoch, (stage, position))
            if self.fetching.collates and not getattr(dataset, "__getitems__", None):
                rows: list[Any] = []
                lineages = [(stage, position, row) for row in range(len(index))]
                for each in draws.rows(epoch, lineages, rows, 0, index):
                    rows.append(dataset[each])  # noqa: PERF401 (its length says which row is in work)
                draws.one(epoch, (stage, position))
                return self.fetching.collate(rows)
        if self._fetcher is None:
            if self.resume:
                restore_copy(dataset, self.resume[self.number][1])
            self._fetcher = self.fetching.fetcher(_DatasetKind.Map)
        return self._fetcher.fetch(index)


class IterableBatches(_Batches):
    """Batches of an ``IterableDataset``, whose copies in the workers are each read by themselves."""

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[tuple[int, Any]]:
        number = self.number
        self._draw_for(epoch, 0)
        try:
            self._set_up()
            done, state = self.resume[number] if self.resume and epoch == 0 else (0, None)
            fetcher = begun(self.fetching, done, state)
        except Exception as error:
            yield 0, Failed(error)
            return
        index = None if self.fetching.size is None else [None] * self.fetching.size
        for step in count():
            self._draw_for(epoch, done + step)  # of a resumed epoch too
            data: Any
            try:
                data = fetcher.fetch(index)
            except StopIteration:
                return
            except Exception as error:
                data = Failed(error)
            if step >= start:
                yield step, Stateful(number, data, where(fetcher))

    def _draw_for(self, epoch: int, step: int) -> None:
        """A batch draws numbers of its own in a thread; those in a process are the worker's, as torch's are."""
        if self.worker is None:
            self._draws.one(epoch, (self._context.stage, step))


def pinned(place: torch.device | None, device: str | None, batch: Any) -> Any:
    """A batch in pinned memory, as torch's ``DataLoader`` pins it: for the trainer's own accelerator."""
    from pipegraph.device.slabs import on_device

    pin: Any = pin_memory
    if isinstance(batch, Stateful):
        batch.data = pinned(place, device, batch.data)
        return batch
    with on_device(place):
        return batch if isinstance(batch, Failed) else pin(batch, device)
