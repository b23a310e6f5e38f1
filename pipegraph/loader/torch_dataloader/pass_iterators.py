"""The passes of a ``pg.DataLoader`` with workers: torch's iterators over a pipeline, or over torch's own workers."""

from __future__ import annotations

import contextlib
import copy
import errno
import signal
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import _DatasetKind
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from pipegraph.chunk import Chunk
from pipegraph.errors import StageTimeoutError, WorkerDiedError
from pipegraph.graph import Graph
from pipegraph.in_turn import InTurn
from pipegraph.loader.loader import Loader
from pipegraph.loader.torch_dataloader.batch_progress import BatchProgress
from pipegraph.loader.torch_dataloader.batch_sources import (
    STAGE,
    Failed,
    IndexFeed,
    IterableBatches,
    MapBatches,
    Stateful,
    pinned,
)
from pipegraph.loader.torch_dataloader.dataset_worker import DatasetWorker, WorkerProcess
from pipegraph.loader.torch_dataloader.fetching import Fetching, ReadAgain
from pipegraph.loader.torch_dataloader.inline_pass import Noting
from pipegraph.parameters import length_of


def next_worker(progress: BatchProgress, iterable: bool, workers: int) -> int:
    return progress.turn if iterable else progress.batches % workers


def shares_of(loader: Any) -> int:
    """How many stages fetch in turn: one per process, unless batches come as they are ready."""
    in_turn = loader.in_order or loader._dataset_kind == _DatasetKind.Iterable
    return loader.num_workers if loader.workers == "process" and in_turn else 1


def pipeline(
    loader: Any, feed: IndexFeed, base_seed: int, progress: BatchProgress, pin: Callable[[Any], Any] | None
) -> Graph:
    """The graph of a pass, whose errors come in their batch's place."""
    count, shares = loader.num_workers, shares_of(loader)
    iterable = loader._dataset_kind == _DatasetKind.Iterable
    processes = loader.workers == "process"
    ahead = loader.prefetch_factor or 1
    fetching = Fetching(
        loader.dataset, loader.collate_fn, loader._auto_collation, loader.batch_size, loader.drop_last
    )
    worker = DatasetWorker(0, count, base_seed, loader.worker_init_fn) if processes else None
    resume = progress.copies.copy()
    batches = length_of(loader)
    graph = Graph("dataloader", seed=base_seed)
    nodes = []
    for share in range(shares):
        # Stages in turn have a worker each, a stage alone has them all; an iterable is read by one thread.
        workers = 1 if shares > 1 or iterable else count
        made = (
            IterableBatches(fetching, worker, resume)
            if iterable
            else MapBatches(fetching, worker, resume, feed, batches, shares, share)
        )
        node = graph.add(
            made,
            name=STAGE.format(share) if shares > 1 else "batches",
            backend=loader.workers,
            timeout=(loader.timeout or None) if processes else None,
            workers=workers,
            ordered=loader.in_order or shares > 1,
            capacity=ahead * workers,
        )
        nodes.append(node)
    if shares > 1:
        merged = InTurn()
        merged.first = next_worker(progress, iterable, shares)
        node = graph.add(merged, *nodes, name="batches", capacity=1)
    if pin is not None:
        node.then(pin, name="pin", capacity=1)
    return graph


class Pipelined(Noting):
    """Passes over one running pipeline; what is the same as in torch stands in ``_MultiProcessingDataLoaderIter``."""

    _running: Loader
    _passing: Iterator[Any]

    def __init__(self, loader: Any) -> None:
        self._loader = weakref.ref(loader)
        self._progress = progress = loader._next_progress()
        before = loader._base_state()
        super().__init__(loader)
        if progress.before and progress.base_seed is not None:  # persistent workers kept their base seed
            loader._put_base_state(before)
        base_seed = int(self._base_seed) if progress.base_seed is None else progress.base_seed
        self._base_seed = progress.base_seed = base_seed
        self._ahead = (loader.prefetch_factor or 1) * loader.num_workers
        self._indexed = self._dataset_kind == _DatasetKind.Map
        self._in_order = loader.in_order or not self._indexed
        self._feed = IndexFeed(shares_of(loader))
        pin = None
        if self._pin_memory:
            from pipegraph.device.backend import current_device

            pin = partial(pinned, current_device(), self._pin_memory_device)
        self._running = pipeline(loader, self._feed, base_seed, progress, pin).loader(rank=0, world_size=1)
        self._epoch = 0
        self._begin()
        self._workers = WorkerProcess.all_of(self._running)

    def _end_workers(self) -> None:
        self._running.close()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Another pass with the same workers, which first do what was asked of them, as torch's do."""
        if self._indexed and not self._progress.finished:
            self._feed.end()
            with contextlib.suppress(Exception):
                for _ in self._passing:
                    pass
        self._begin_another(loader)
        super()._reset(loader, first_iter)
        self._epoch += 1
        self._begin()

    def _begin(self) -> None:
        if self._indexed:
            self._feed.restart(self._sampler_iter, self._progress.remaining)
        self._running.set_epoch(self._epoch)
        self._passing = self._running.chunks()
        if self._indexed:
            for _ in range(self._ahead):
                self._feed.draw()

    def _next_in_torch(self) -> Any:
        try:
            return next(self._passing)
        except StopIteration:
            if not self._persistent_workers:
                self._running.close()
            raise
        except Exception as error:
            reworded = self._as_torch_says(error)
            try:
                if reworded is error:
                    raise
                raise reworded from error
            finally:
                del reworded  # its traceback refers to this frame, which holds the workers

    def _next_data(self) -> Any:
        data = super()._next_data().data
        if data.__class__ is Stateful:
            data = data.data
        if data.__class__ is Failed:
            self._deliver()
            raise self._as_torch_says(data.error.error())
        return data

    def _note(self, came: Chunk) -> None:
        if self._indexed:
            self._feed.draw()
        if came.data.__class__ is Stateful:
            self._progress.deliver_of(came.data.worker, came.data.state)
        self._progress.deliver(None if self._in_order else int(came.positions[0]))

    def _as_torch_says(self, error: BaseException) -> BaseException:
        """What scripts that catch errors of torch's workers look for."""
        if isinstance(error, StageTimeoutError):
            return RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
        if isinstance(error, WorkerDiedError):
            status = error.status or 0
            how = (
                f"is killed by signal: {signal.strsignal(-status)}"
                if status < 0
                else f"exited unexpectedly with exit code {status}"
            )
            return WorkerDiedError(f"DataLoader worker (pid {error.pid}) {how}. {error}")
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            return RuntimeError(
                "Too many open files: each batch that is kept holds a descriptor of shared memory. Keep fewer, or "
                "raise the limit with `ulimit -n` (torch.multiprocessing.set_sharing_strategy changes nothing here)"
            )
        return error


class Inherited(Noting, _MultiProcessingDataLoaderIter):
    """Torch's own workers, which are forks of this process and inherit what cannot be sent, with a state."""

    _next_in_torch = _MultiProcessingDataLoaderIter._next_data
    _came: tuple[int | None, int]
    _got: Any = _MultiProcessingDataLoaderIter._get_data
    _processed: Any = _MultiProcessingDataLoaderIter._process_data

    def __init__(self, loader: Any) -> None:
        self._loader = weakref.ref(loader)
        self._progress = progress = loader._next_progress()
        self._iterable = loader._dataset_kind == _DatasetKind.Iterable
        done = [batches for batches, _ in progress.copies]
        if self._iterable and any(done):
            loader = copy.copy(loader)
            vars(loader)["dataset"] = ReadAgain(loader.dataset, done, loader.batch_size or 1)
        super().__init__(loader)
        progress.base_seed = int(self._base_seed)

    def _end_workers(self) -> None:
        self._shutdown_workers()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            self._begin_another(loader)
        self._turn = next_worker(self._progress, self._iterable, self._num_workers)
        self._remaining = self._progress.remaining  # as the pass begins
        super()._reset(loader, first_iter)

    def _try_put_index(self) -> None:
        for _ in range(self._turn):  # the first batch of a resumed pass
            next(self._worker_queue_idx_cycle)
        self._turn = 0
        super()._try_put_index()

    def _get_data(self) -> Any:
        found = self._got()
        self._step = found[0]
        return found

    def _process_data(self, data: Any, worker_idx: int) -> Any:
        # Out of order, what was received last is processed at once.
        ordered = self._in_order or self._iterable
        self._came = None if ordered else self._remaining.number(self._step), worker_idx
        try:
            return self._processed(data, worker_idx)
        except Exception:  # in the batch's place
            self._note(None)
            raise

    def _note(self, came: Any) -> None:
        number, worker = self._came
        self._progress.deliver(number)
        if self._iterable:
            self._progress.deliver_of(worker, None)
