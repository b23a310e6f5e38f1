"""A transform in pure Python that holds the interpreter lock for about a millisecond: work for processes.

Claim: ahead of every peer with the same two processes.

    python benchmarks/python_transform.py --rounds 5
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import harness
from harness import Contestant
from hop_cost import shut_down
from images import WORKERS, one_thread_each

CLAIM = "a transform that holds the lock: ahead of every peer with the same two processes"
IDEAL = "hand-written process pool"
OURS = "pipegraph, processes"
BATCH = 32
PREFETCH = 4
ENDLESS = 1 << 30
TEXT = ("the quick brown fox jumps over the lazy dog; " * 200).split(" ")


def transform(index: int) -> Any:
    """Count and encode the words of a text, shifted by the index: int64 (256,)."""
    import torch

    counts: dict[str, int] = {}
    codes = []
    for place, word in enumerate(TEXT):
        code = index + place
        for letter in word:
            code = (code * 31 + ord(letter)) & 0xFFFF
        counts[word] = counts.get(word, 0) + 1
        codes.append(code + counts[word])
    return torch.tensor(codes[:256])


def transform_batch(start: int) -> Any:
    """The batch that starts at index ``start``."""
    import torch

    return torch.stack([transform(index) for index in range(start, start + BATCH)])


def transform_array(start: int) -> Any:
    """The same as a NumPy array."""
    return transform_batch(start).numpy()


class Samples:
    """A map-style data set of transformed samples."""

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        return transform(index)


@contextmanager
def pool(unused: None) -> Iterator[Any]:
    """Hand-written: a pool of two processes, a batch per task, a few in flight, small arrays pickled."""
    import torch

    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(WORKERS, mp_context=context, initializer=one_thread_each) as workers:
        flight = deque(workers.submit(transform_array, i * BATCH) for i in range(PREFETCH + WORKERS))

        def batches() -> Iterator[Any]:
            for start in range(len(flight) * BATCH, ENDLESS, BATCH):
                yield torch.from_numpy(flight.popleft().result())
                flight.append(workers.submit(transform_array, start))

        yield batches()
        workers.shutdown(cancel_futures=True)


@contextmanager
def pipegraph(unused: None, backend: str) -> Iterator[Any]:
    """The plain way: a function on every item, then a batch."""
    import pipegraph as pg
    from pipegraph import operators as ops

    graph = pg.Graph("transform")
    source = graph.add(ops.FromIterable(range(ENDLESS)), capacity=BATCH)
    samples = source.then(ops.Map(transform), workers=WORKERS, backend=backend, capacity=BATCH * PREFETCH)
    samples.then(ops.Batch(BATCH), capacity=PREFETCH)
    with graph.loader() as loader:
        yield loader


@contextmanager
def pipegraph_batches(unused: None) -> Iterator[Any]:
    """A function on the start of a batch: one item per batch crosses to the process and back."""
    import pipegraph as pg
    from pipegraph import operators as ops

    graph = pg.Graph("transform")
    source = graph.add(ops.FromIterable(range(0, ENDLESS, BATCH)))
    source.then(ops.Map(transform_batch), workers=WORKERS, backend="process", capacity=PREFETCH)
    with graph.loader() as loader:
        yield loader


@contextmanager
def dataloader(unused: None) -> Iterator[Any]:
    """Two persistent processes."""
    from torch.utils.data import DataLoader

    data: Any = Samples()
    loader: Any = DataLoader(
        data,
        batch_size=BATCH,
        num_workers=WORKERS,
        prefetch_factor=PREFETCH // WORKERS,
        persistent_workers=True,
    )
    iterator = iter(loader)
    yield iterator
    iterator._shutdown_workers()


@contextmanager
def torchdata_nodes(unused: None, method: Any) -> Iterator[Any]:
    """A batch per task."""
    from torchdata.nodes import IterableWrapper, Loader, ParallelMapper, Prefetcher

    node: Any = IterableWrapper(range(0, ENDLESS, BATCH))
    node = Prefetcher(ParallelMapper(node, transform_batch, num_workers=WORKERS, method=method), PREFETCH)
    iterator = iter(Loader(node))
    yield iterator
    shut_down(iterator)


@contextmanager
def spdl(unused: None) -> Iterator[Any]:
    """A batch per task in a process pool, as its guide to parallelism shows."""
    from spdl.pipeline import PipelineBuilder

    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(WORKERS, mp_context=context, initializer=one_thread_each) as executor:
        empty: Any = PipelineBuilder()
        builder = empty.add_source(range(0, ENDLESS, BATCH))
        builder = builder.pipe(transform_batch, concurrency=WORKERS, executor=executor, output_order="input")
        pipeline = builder.add_sink(PREFETCH).build(num_threads=WORKERS, use_thread_output_queue=True)
        with pipeline.auto_stop(timeout=120):
            yield pipeline


def contestants() -> list[Contestant]:
    """All ways to run the transform."""
    streams: dict[str, Any] = {
        IDEAL: pool,
        OURS: partial(pipegraph, backend="process"),
        "pipegraph, processes, batches": pipegraph_batches,
        "pipegraph, threads": partial(pipegraph, backend="thread"),
        "DataLoader, processes": dataloader,
        "torchdata.nodes, processes": partial(torchdata_nodes, method="process"),
        "torchdata.nodes, threads": partial(torchdata_nodes, method="thread"),
        "SPDL, processes": spdl,
    }
    return [
        Contestant(name, partial(stream, None), warm=8, timed=32, weight=BATCH)
        for name, stream in streams.items()
    ]


def check(contestant: Contestant) -> str:
    """The first batch must be exactly that of the function."""
    import torch

    with contestant.stream() as stream:
        if not torch.equal(next(iter(stream)), transform_batch(0)):
            raise RuntimeError(f"{contestant.name}: other values than the function's")
    return "equal"


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    options = parser.parse_args()
    one_thread_each()
    configuration = {
        "batch": BATCH, "workers": WORKERS, "prefetch_batches": PREFETCH, "rounds": options.rounds,
    }  # fmt: skip
    harness.compare(
        "python_transform", CLAIM, configuration, contestants(), check, [IDEAL, OURS], "samples", options
    )


if __name__ == "__main__":
    main()
