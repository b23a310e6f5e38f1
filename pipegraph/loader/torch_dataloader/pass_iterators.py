"""The passes of a ``pg.DataLoader``: torch's iterators, with a position that the loader's state describes."""

from __future__ import annotations

import contextlib
import errno
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset, _DatasetKind
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from pipegraph.device import current_device
from pipegraph.errors import StageTimeoutError, WorkerDiedError
from pipegraph.graph import Graph
from pipegraph.loader.loader import Loader
from pipegraph.loader.torch_dataloader.batch_progress import BatchProgress, Indices, IndicesAnew, keeps_state
from pipegraph.loader.torch_dataloader.batch_sources import (
    STAGE,
    Failed,
    Fetching,
    InTurn,
    IterableBatches,
    MapBatches,
    ReadAgain,
    Stateful,
    begun,
    pinned,
    restore_copy,
    where,
    where_copy,
)
from pipegraph.loader.torch_dataloader.dataset_worker import DatasetWorker, WorkerProcess
from pipegraph.loader.torch_dataloader.index_feed import IndexFeed, WorkerIndices
from pipegraph.loader.torch_dataloader.resumable import ResumableDataLoader


def next_worker(progress: BatchProgress, iterable: bool, workers: int) -> int:
    return progress.turn if iterable else progress.batches % workers


class Pipeline:
    """The graph of a loader's pass."""

    def __init__(self, loader: ResumableDataLoader[Any], dataset: Any, base_seed: int, carries: bool) -> None:
        self._loader = loader
        self._base_seed = base_seed
        self._iterable = loader._dataset_kind == _DatasetKind.Iterable
        self._fetching = Fetching(
            dataset, loader.collate_fn, loader._auto_collation, loader.batch_size, loader.drop_last, carries
        )
        processes = loader.workers == "process" and loader.num_workers > 0
        self._backend = "process" if processes else "thread" if loader.num_workers else "inline"
        count = max(1, loader.num_workers)
        self._workers = count
        in_turn = processes and count > 1 and (loader.in_order or self._iterable)
        self.shares = count if in_turn else 1
        self._worker = DatasetWorker(0, count, base_seed, loader.worker_init_fn) if processes else None

    def graph(
        self, feed: WorkerIndices, pin: str | None, pins: bool = False, progress: BatchProgress | None = None
    ) -> Graph:
        loader = self._loader
        graph = Graph("dataloader", seed=self._base_seed)
        source: MapBatches | IterableBatches
        resume = progress.copies.copy() if progress else ()
        if self._iterable:
            source = IterableBatches(self._fetching, self._worker, resume)
        else:
            try:
                count: int | None = len(loader)
            except (TypeError, NotImplementedError):
                count = None
            source = MapBatches(self._fetching, self._worker, feed, count, resume)
        options: dict[str, Any] = {
            "backend": self._backend,
            "timeout": loader.timeout or None if self._backend == "process" else None,
        }
        ahead = loader.prefetch_factor or 1
        if self.shares == 1:
            workers = 1 if self._iterable else self._workers
            node = graph.add(
                source,
                name="batches",
                workers=workers,
                ordered=loader.in_order,
                capacity=max(1, ahead * workers),
                **options,
            )
        else:
            nodes = []
            for share in range(self.shares):
                each = source.split(self.shares, share) if isinstance(source, MapBatches) else source
                nodes.append(graph.add(each, name=STAGE.format(share), capacity=max(1, ahead), **options))
            node = graph.add(
                InTurn(next_worker(progress, self._iterable, self.shares) if progress else 0),
                *nodes,
                name="batches",
                capacity=1,
            )
        if pins:
            node.then(partial(pinned, current_device(), pin), name="pin", capacity=1)
        return graph


class Inline(_SingleProcessDataLoaderIter):
    """``num_workers=0``: torch's own loop, in the consumer's thread, with a state."""

    def __init__(self, loader: ResumableDataLoader[Any]) -> None:
        self._progress = progress = loader._next_progress()
        super().__init__(loader)
        progress.base_seed = int(self._base_seed)
        done, state = progress.copies[0] if progress.copies else (0, None)
        if self._dataset_kind == _DatasetKind.Map:
            self._sampler_iter = indices = Indices(self._index_sampler, progress)
            if progress.copies or loader._random is not None:
                indices.begin()  # before the data set says or sets how the global generator stands
            if progress.copies:
                restore_copy(self._dataset, state)
                progress.copies[0] = (done, where_copy(self._dataset))
            return
        if done or state is not None:
            fetching = Fetching(
                self._dataset, self._collate_fn, self._auto_collation, loader.batch_size, self._drop_last
            )
            self._dataset_fetcher = begun(fetching, done, state)
        # Not as the data set says, which may still tell of where its last pass ended.
        elif keeps_state(self._dataset_fetcher.dataset_iter):
            progress.copies[0] = (0, where(self._dataset_fetcher))

    _fetched: Any = _SingleProcessDataLoaderIter._next_data

    def _next_data(self) -> Any:
        progress = self._progress
        try:
            data = self._fetched()
        except StopIteration:
            progress.finished = True
            raise
        progress.deliver()
        if progress.copies:
            iterable = self._dataset_kind == _DatasetKind.Iterable
            progress.deliver_of(0, where(self._dataset_fetcher) if iterable else where_copy(self._dataset))
        return data


class Pipelined(_BaseDataLoaderIter):
    """Passes over one running pipeline; what is the same as in torch stands in ``_MultiProcessingDataLoaderIter``."""

    _running: Loader
    _passing: Iterator[Any]

    def __init__(self, loader: ResumableDataLoader[Any]) -> None:
        self._progress = progress = loader._next_progress()
        stands = loader._base_state()
        super().__init__(loader)
        if progress.before and progress.base_seed is not None:  # persistent workers kept their base seed
            loader._put_base_state(stands)
        base_seed = int(self._base_seed) if progress.base_seed is None else progress.base_seed
        self._base_seed = progress.base_seed = base_seed
        self._ahead = (loader.prefetch_factor or 1) * loader.num_workers
        self._indexed = self._dataset_kind == _DatasetKind.Map
        pipeline = Pipeline(loader, self._dataset, base_seed, carries=True)
        self._shares = pipeline.shares
        self._in_order = loader.in_order or not self._indexed
        self._feed = IndexFeed(self._shares)
        graph = pipeline.graph(self._feed, self._pin_memory_device, self._pin_memory, progress)
        self._running = graph.loader(rank=0, world_size=1)
        self._epoch = 0
        self._begin(loader)
        self._workers = WorkerProcess.all_of(self._running)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Another pass with the same workers, which first do what was asked of them, as torch's do."""
        if self._indexed and not self._progress.finished:
            self._over = True
            self._feed.end()
            with contextlib.suppress(Exception):
                for _ in self._passing:
                    pass
        super()._reset(loader, first_iter)
        base_seed = self._progress.base_seed
        self._progress = loader._next_progress()
        self._progress.base_seed = base_seed
        self._epoch += 1
        self._begin(loader)

    def _begin(self, loader: ResumableDataLoader[Any]) -> None:
        self._over = False
        self._feed.restart(
            next_worker(self._progress, not self._indexed, self._shares), self._progress.remaining
        )
        self._running.set_epoch(self._epoch)
        self._passing = self._running.chunks()
        if self._indexed:
            self._sampler_iter = Indices(self._index_sampler, self._progress)
            for _ in range(self._ahead):
                self._draw()

    def _draw(self) -> None:
        if not self._over:
            try:
                self._feed.put(next(self._sampler_iter))
            except StopIteration:
                self._over = True
                self._feed.end()

    def _next_data(self) -> Any:
        progress = self._progress
        try:
            chunk = next(self._passing)
        except StopIteration:
            progress.finished = True
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
        if self._indexed:
            self._draw()
        data = chunk.data
        if data.__class__ is Stateful:
            progress.deliver_of(data.worker, data.state)
            data = data.data
        progress.deliver(None if self._in_order else int(chunk.positions[0]))
        if data.__class__ is Failed:
            raise self._as_torch_says(data.error.error())
        return data

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


class Inherited(_MultiProcessingDataLoaderIter):
    """Torch's own workers, which are forks of this process and inherit what cannot be sent, with a state."""

    _sampler: Any
    _copied: Any

    def __init__(self, loader: ResumableDataLoader[Any]) -> None:
        self._progress = loader._next_progress()
        self._batch_size = loader.batch_size or 1
        super().__init__(loader)
        self._progress.base_seed = int(self._base_seed)

    @property
    def _index_sampler(self) -> Any:
        """What torch's iterator draws indices from."""
        if isinstance(self._copied, IterableDataset):
            return self._sampler
        return IndicesAnew(self._sampler, self._progress)

    @_index_sampler.setter
    def _index_sampler(self, sampler: Any) -> None:
        self._sampler = sampler

    @property
    def _dataset(self) -> Any:
        """What torch's iterator gives to the workers."""
        done = [batches for batches, _ in self._progress.copies]
        if not any(done) or not isinstance(self._copied, IterableDataset):
            return self._copied
        return ReadAgain(self._copied, done, self._batch_size)

    @_dataset.setter
    def _dataset(self, dataset: Any) -> None:
        self._copied = dataset

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            base_seed = self._progress.base_seed
            self._progress = loader._next_progress()
            self._progress.base_seed = base_seed
        iterable = self._dataset_kind == _DatasetKind.Iterable
        self._turn = next_worker(self._progress, iterable, self._num_workers)
        self._remaining = self._progress.remaining  # as the pass begins
        super()._reset(loader, first_iter)

    def _try_put_index(self) -> None:
        for _ in range(self._turn):  # the first batch of a resumed pass
            next(self._worker_queue_idx_cycle)
        self._turn = 0
        super()._try_put_index()

    _received: Any = _MultiProcessingDataLoaderIter._next_data
    _got: Any = _MultiProcessingDataLoaderIter._get_data
    _processed: Any = _MultiProcessingDataLoaderIter._process_data

    def _next_data(self) -> Any:
        try:
            return self._received()
        except StopIteration:
            self._progress.finished = True
            raise

    def _get_data(self) -> Any:
        found = self._got()
        self._step = found[0]
        return found

    def _process_data(self, data: Any, worker_idx: int) -> Any:
        iterable = self._dataset_kind == _DatasetKind.Iterable
        # Out of order, what was received last is processed at once.
        ordered = self._in_order or iterable
        self._progress.deliver(None if ordered else self._remaining.number(self._step))
        if iterable:
            self._progress.deliver_of(worker_idx, None)
        return self._processed(data, worker_idx)
