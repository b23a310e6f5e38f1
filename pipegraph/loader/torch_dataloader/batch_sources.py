"""Sources of whole batches, as torch's fetchers make them, and the fan-in that merges the workers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, final

import torch
from torch.utils.data import _DatasetKind, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from pipegraph.capabilities import Interchangeable, Sampled, UserData
from pipegraph.chunk import Chunk, Cursor
from pipegraph.contracts import Context, Drawn, Fact, FanIn, History, Source
from pipegraph.device.slabs import on_device
from pipegraph.engine.remote.exceptions import Carried
from pipegraph.global_generators import Draws
from pipegraph.loader.torch_dataloader.batch_progress import keeps_state
from pipegraph.loader.torch_dataloader.dataset_worker import DatasetWorker, become_worker, own_copy
from pipegraph.loader.torch_dataloader.index_feed import WorkerIndices
from pipegraph.parameters import function_name

STAGE = "worker-{}"
"""Stages of workers that have indices of their own."""


@dataclass(frozen=True)
class Fetching:
    """How batches are fetched.

    Attributes:
        size: of the batches of an iterable; None gives its items as they are.
        collates: whether an index is a list of indices, and a batch is collated.
        carries: whether an error is delivered in its batch's place, so that those behind it follow.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    collates: bool
    size: int | None = None
    drop_last: bool = False
    carries: bool = False

    def fetcher(self, kind: int) -> Any:
        create: Any = _DatasetKind.create_fetcher
        return create(kind, self.dataset, self.collates, self.collate, self.drop_last)

    def config(self) -> dict[str, Any]:
        """For the digest of a graph."""
        facts = {"dataset": type(self.dataset).__qualname__, "collate": function_name(self.collate)}
        return {**facts, "size": self.size, "drop_last": self.drop_last}


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
class _Batches(Source, Interchangeable):
    """What the two sources share.

    Attributes:
        worker: as whom a process fetches; None fetches in threads, each with a copy of the dataset.
        resume: of each worker, batches delivered and the state behind them; empty where copies have no states.
    """

    fetching: Fetching
    worker: DatasetWorker | None
    resume: Sequence[Any]

    name = "batches"
    facts = Fact.SEEDS_ITSELF | Fact.TRUSTED | Fact.ONE_WORLD_SIZE
    gives = "batch"
    sent_as = "batches"

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
class MapBatches(_Batches, Sampled, UserData):
    """Batches of a map-style dataset, for one of ``shares`` stages that fetch in turn.

    Attributes:
        batches: in an epoch; None if that is not known.
    """

    feed: WorkerIndices
    batches: int | None
    shares: int = 1
    share: int = 0
    _fetcher: Any = field(default=None, init=False)

    facts = Fact.WAITS
    random_access = True

    def has_length(self) -> bool:
        return self.batches is not None

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        return None if self.batches is None else len(range(self.share, self.batches, self.shares))

    def begin_run(self, epoch: int, history: History) -> None:
        super().begin_run(epoch, history)
        self.feed.begin()

    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[Drawn]:
        for step, index in enumerate(self.feed.indices_of(epoch, self.share)):
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
            if not self.fetching.carries:
                raise
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
        number, carries = self.number, self.fetching.carries
        self._draw_for(epoch, 0)
        try:
            self._set_up()
            done, state = self.resume[number] if self.resume and epoch == 0 else (0, None)
            fetcher = begun(self.fetching, done, state)
        except Exception as error:
            if not carries:
                raise
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
                if not carries:
                    raise
                data = Failed(error)
            if step >= start:
                yield step, Stateful(number, data, where(fetcher)) if carries else data

    def _draw_for(self, epoch: int, step: int) -> None:
        """A batch draws numbers of its own in a thread; those in a process are the worker's, as torch's are."""
        if self.worker is None:
            self._draws.one(epoch, (self._context.stage, step))


def begun(fetching: Fetching, done: int, state: Any) -> Any:
    """Torch's fetcher of an iterable, behind the batches that were delivered."""
    if state is not None:
        holder, kept, ended = state
        if isinstance(kept, dict) and "epoch" in kept and hasattr(fetching.dataset, "set_epoch"):
            fetching.dataset.set_epoch(kept["epoch"])  # Hugging Face's take up states of that epoch only
        if holder == "dataset":
            fetching.dataset.load_state_dict(kept)
        fetcher = fetching.fetcher(_DatasetKind.Iterable)
        if holder == "iterator":
            fetcher.dataset_iter.load_state_dict(kept)
        fetcher.ended = ended
        return fetcher
    fetcher = fetching.fetcher(_DatasetKind.Iterable)
    if done:
        for _ in islice(fetcher.dataset_iter, done * (fetching.size or 1)):
            pass
    return fetcher


@dataclass(eq=False)
class ReadAgain:
    """An iterable in torch's own workers, behind what each has delivered, the first time that it is iterated there."""

    dataset: Any
    done: list[int]
    """Batches delivered, of each worker."""
    size: int

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        done, self.done[info.id] = self.done[info.id], 0
        return islice(iter(self.dataset), done * self.size, None)


def where(fetcher: Any) -> tuple[str, Any, bool] | None:
    """The state of an iterable's iterator, else its own, and whether its last batch has met its end: the state of one
    that has ended may be that of its beginning. None if neither has a state."""
    for name, holder in (("iterator", fetcher.dataset_iter), ("dataset", fetcher.dataset)):
        if keeps_state(holder):
            return name, copy.deepcopy(holder.state_dict()), fetcher.ended
    return None


def where_copy(dataset: Any) -> tuple[str, Any]:
    """The state of a map-style dataset that has one."""
    return "dataset", copy.deepcopy(dataset.state_dict())


def restore_copy(dataset: Any, state: tuple[str, Any] | None) -> None:
    """The inverse of :func:`where_copy`; None leaves it as it is."""
    if state is not None:
        dataset.load_state_dict(state[1])


class InTurn(FanIn):
    """One item from each input in turn, in the first epoch from ``first`` on; one that has ended is left out then."""

    facts = Fact.SEEDS_ITSELF | Fact.TRUSTED | Fact.SEPARATE
    name = "batches"
    inputs_in = (2, None)

    def __init__(self, first: int = 0) -> None:
        self._first = first

    def config(self) -> dict[str, Any]:
        return {}

    def begin(self, inputs: int, epoch: int) -> None:
        self._ended = [False] * inputs
        self._at = self._first if epoch == 0 else 0

    def next_input(self) -> int | None:
        for _ in self._ended:
            if not self._ended[self._at]:
                return self._at
            self._at = (self._at + 1) % len(self._ended)
        return None

    def end_input(self, index: int) -> None:
        self._ended[index] = True

    def process(self, chunk: Chunk) -> Chunk:
        self._at = (self._at + 1) % len(self._ended)
        return chunk

    def merged_length(self, lengths: Sequence[int]) -> int | None:
        return sum(lengths)

    def cursor(self, positions: Sequence[Cursor]) -> Cursor:
        return (self._at, tuple(self._ended), *positions)

    def cursors(self, cursor: Cursor, inputs: int) -> list[Cursor]:
        self._at, ended = cursor[:2]
        self._ended = list(ended)
        return list(cursor[2:])


def pinned(place: torch.device | None, device: str | None, batch: Any) -> Any:
    """A batch in pinned memory, as torch's ``DataLoader`` pins it: for the trainer's own accelerator."""
    pin: Any = pin_memory
    if isinstance(batch, Stateful):
        batch.data = pinned(place, device, batch.data)
        return batch
    with on_device(place):
        return batch if isinstance(batch, Failed) else pin(batch, device)
