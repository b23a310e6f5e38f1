"""How the other loaders are opened: each as its documentation recommends for speed, streams without end."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from images import ENDLESS_EPOCHS, WORKERS, one_thread_each, write_shards

PREFETCH = 4  # batches, wherever a contestant lets one choose


class Samples:
    """A map-style dataset: a function of a path, the paths repeated without end in sight."""

    def __init__(self, paths: Sequence[str], function: Callable[[str], Any]) -> None:
        self.paths = paths
        self.function = function

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Any:
        return self.function(self.paths[index % len(self.paths)])


def start_worker(worker: int) -> None:
    """Threads held to one, and random numbers that differ from the other worker's."""
    import random

    one_thread_each()
    random.seed(worker)


@contextmanager
def dataloader(data: Any, prefetch: int = PREFETCH, workers: int = WORKERS, **options: Any) -> Iterator[Any]:
    """Persistent worker processes that collate straight into shared memory, ``prefetch`` batches ahead in all."""
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(
        data,
        num_workers=workers,
        prefetch_factor=max(1, prefetch // workers),
        persistent_workers=True,
        **options,
    )
    iterator = iter(loader)
    yield iterator
    iterator._shutdown_workers()


@contextmanager
def nodes(
    items: Iterable[Any],
    function: Callable[[Any], Any],
    method: Any = "thread",
    batch: int = 0,
    prefetch: int = PREFETCH,
    workers: int = WORKERS,
) -> Iterator[Any]:
    """torchdata.nodes as its migration guide does: batch the indices, map and collate in the workers, prefetch."""
    from torchdata.nodes import Batcher, IterableWrapper, Loader, ParallelMapper, Prefetcher

    node: Any = IterableWrapper(items)
    if batch:
        node = Batcher(node, batch)
    node = ParallelMapper(node, function, num_workers=workers, method=method)
    iterator = iter(Loader(Prefetcher(node, prefetch)))
    yield iterator
    shut_down(iterator)


def shut_down(node: Any) -> None:
    """Stop the threads of a torchdata node and of all above it (its own shutdown leaves those above)."""
    while node is not None:
        inner = getattr(node, "_it", None)
        stop = getattr(inner if inner is not None else node, "_shutdown", None)
        if stop is not None:
            stop()
        node = inner if inner is not None else getattr(node, "root", getattr(node, "source", None))


@contextmanager
def spdl(
    items: Iterable[Any],
    function: Callable[[Any], Any],
    batch: int = 0,
    prefetch: int = PREFETCH,
    workers: int = WORKERS,
    executor: Any = None,
    collate: Callable[[Any], Any] | None = None,
) -> Iterator[Any]:
    """A batch per task; with ``collate`` an item per task, and batches are made of what comes out."""
    from spdl.pipeline import PipelineBuilder

    empty: Any = PipelineBuilder()
    builder = empty.add_source(items)
    if batch and collate is None:
        builder = builder.aggregate(batch)
    place = {} if executor is None else {"executor": executor}
    builder = builder.pipe(function, concurrency=workers, output_order="input", **place)
    if collate is not None:
        builder = builder.aggregate(batch).pipe(collate)
    pipeline = builder.add_sink(prefetch).build(num_threads=workers, use_thread_output_queue=True)
    with pipeline.auto_stop(timeout=120):
        yield pipeline


@contextmanager
def grain(data: Any, prefetch: int = PREFETCH, workers: int = WORKERS) -> Iterator[Any]:
    """A Grain ``MapDataset`` of batches, read in threads, each of which makes whole batches."""
    import grain as gr
    import torch

    options = gr.ReadOptions(num_threads=workers, prefetch_buffer_size=prefetch)
    iterator = iter(data.to_iter_dataset(options))
    yield (torch.as_tensor(batch) for batch in iterator)
    iterator.close()


@contextmanager
def webdataset(
    paths: Sequence[str],
    function: Callable[[Any], Any],
    collate: Callable[[Any], Any],
    batch: int,
    prefetch: int = PREFETCH,
    workers: int = WORKERS,
) -> Iterator[Any]:
    """Tar shards through WebLoader: worker processes that decode and collate."""
    import webdataset as wds

    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(paths, Path(folder), workers)
        data = wds.WebDataset(shards * ENDLESS_EPOCHS, shardshuffle=False)
        data = data.map(function).batched(batch, collation_fn=collate)
        loader = wds.WebLoader(
            data,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=max(1, prefetch // workers),
            worker_init_fn=start_worker,
        )
        iterator = iter(loader)
        yield iterator
        del iterator


@contextmanager
def dali(
    paths: Sequence[str],
    steps: Callable[[Any, Any, Any], Any],
    batch: int,
    prefetch: int = PREFETCH,
    workers: int = WORKERS,
) -> Iterator[Any]:
    """Its own reader, decoder and operators on the CPU, in threads; batches leave through DLPack, uncopied."""
    import torch
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(  # type: ignore[untyped-decorator]
        batch_size=batch, num_threads=workers, device_id=None, prefetch_queue_depth=prefetch
    )
    def definition() -> Any:
        encoded, _ = fn.readers.file(files=list(paths), prefetch_queue_depth=prefetch)
        return steps(fn, types, encoded)

    pipeline = definition()
    pipeline.build()

    def batches() -> Iterator[Any]:
        while True:
            (images,) = pipeline.run()
            yield torch.utils.dlpack.from_dlpack(images.as_tensor())

    yield batches()
