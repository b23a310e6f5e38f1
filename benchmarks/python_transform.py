"""A transform in pure Python, which holds the GIL: work for processes. At 2 ms and at 0.1 ms an item.

Claim: at least 0.95 (0.85 at 0.1 ms) of two hand-written processes, and ahead of every peer with as many.

    python benchmarks/python_transform.py --rounds 5

How many words of the text take so long is measured as it begins, and is the same for all contestants.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import harness
import peers
from harness import Contestant, loaded
from images import WORKERS, one_thread_each
from peers import PREFETCH

CLAIMS = {
    2.0: ">= 0.95 of two hand-written processes, ahead of every peer",
    0.1: ">= 0.85 of two hand-written processes",
}
IDEAL = "hand-written process pool"
OURS = "pipegraph, processes"
BATCH = 32
ENDLESS = 1 << 30
VALUES = 64
TIMED_S = 2.0
TEXT = ("the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog;")


@dataclass(frozen=True)
class Transform:
    """Counts and encodes ``words`` words of a text, shifted by the index: int64 (``VALUES``,)."""

    words: int

    def __call__(self, index: int) -> Any:
        import torch

        counts: dict[str, int] = {}
        codes = []
        for place, word in enumerate(islice(cycle(TEXT), self.words)):
            code = index + place
            for letter in word:
                code = (code * 31 + ord(letter)) & 0xFFFF
            counts[word] = counts.get(word, 0) + 1
            codes.append(code + counts[word])
        return torch.tensor([codes[place % self.words] for place in range(VALUES)])

    def batch(self, start: int) -> Any:
        """The batch that starts at index ``start``."""
        import torch

        return torch.stack([self(index) for index in range(start, start + BATCH)])

    def arrays(self, start: int) -> Any:
        """The same as a NumPy array."""
        return self.batch(start).numpy()

    def array(self, index: int) -> Any:
        """One item as a NumPy array."""
        return self(index).numpy()

    # A map-style dataset of transformed samples.

    def __len__(self) -> int:
        return ENDLESS

    __getitem__ = __call__


def calibrated(item_ms: float) -> Transform:
    """The transform that takes so long here."""
    spent = []
    trial = Transform(1000)
    for index in range(50):
        start = time.perf_counter()
        trial(index)
        spent.append(time.perf_counter() - start)
    return Transform(max(1, round(trial.words * item_ms / 1e3 / min(spent))))


@contextmanager
def pool(transform: Transform) -> Iterator[Any]:
    """Hand-written: a pool of two processes, a batch per task, a few in flight, small arrays pickled."""
    import torch

    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(WORKERS, mp_context=context, initializer=one_thread_each) as workers:
        flight = deque(workers.submit(transform.arrays, i * BATCH) for i in range(PREFETCH + WORKERS))

        def batches() -> Iterator[Any]:
            for start in range(len(flight) * BATCH, ENDLESS, BATCH):
                yield torch.from_numpy(flight.popleft().result())
                flight.append(workers.submit(transform.arrays, start))

        yield batches()
        workers.shutdown(cancel_futures=True)


def pipegraph(transform: Transform, backend: str) -> Any:
    """The plain way: a function on every item, then a batch."""
    import pipegraph as pg
    from pipegraph import operators as ops

    source = pg.Graph("transform").add(ops.FromIterable(range(ENDLESS)))
    samples = source.then(transform, name="transform", workers=WORKERS, backend=backend)
    return loaded(samples.then(ops.Batch(BATCH), capacity=PREFETCH))


def pipegraph_source(transform: Transform) -> Any:
    """A dataset that does the work, read in processes."""
    import pipegraph as pg
    from pipegraph import operators as ops

    source = pg.Graph("transform").add(ops.FromSequence(transform), workers=WORKERS, backend="process")
    return loaded(source.then(ops.Batch(BATCH), capacity=PREFETCH))


def pipegraph_batches(transform: Transform) -> Any:
    """A function on the start of a batch: one item per batch crosses to the process and back."""
    import pipegraph as pg
    from pipegraph import operators as ops

    source = pg.Graph("transform").add(ops.FromIterable(range(0, ENDLESS, BATCH)))
    return loaded(
        source.then(ops.Map(transform.batch), workers=WORKERS, backend="process", capacity=PREFETCH)
    )


def torchdata_nodes(transform: Transform, method: str) -> Any:
    """A batch per task."""
    return peers.nodes(range(0, ENDLESS, BATCH), transform.batch, method)


@contextmanager
def spdl(transform: Transform) -> Iterator[Any]:
    """A batch per task in a process pool, as its guide to parallelism shows."""
    context = multiprocessing.get_context("fork")
    with (
        ProcessPoolExecutor(WORKERS, mp_context=context, initializer=one_thread_each) as executor,
        peers.spdl(range(0, ENDLESS, BATCH), transform.batch, executor=executor) as pipeline,
    ):
        yield pipeline


@contextmanager
def grain(transform: Transform) -> Iterator[Any]:
    """A map dataset, batched and prefetched in two processes, each of which reads in its own thread."""
    import grain as gr
    import torch

    data = gr.MapDataset.range(ENDLESS).map(transform.array).batch(BATCH)
    read = gr.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCH)
    processes = gr.MultiprocessingOptions(num_workers=WORKERS, per_worker_buffer_size=PREFETCH // WORKERS)
    iterator = iter(data.to_iter_dataset(read).mp_prefetch(processes))
    yield (torch.from_numpy(batch) for batch in iterator)
    iterator.close()


def contestants(transform: Transform, item_ms: float) -> list[Contestant]:
    """All ways to run the transform."""
    streams: dict[str, Callable[[Transform], AbstractContextManager[Any]]] = {
        IDEAL: pool,
        OURS: partial(pipegraph, backend="process"),
        "pipegraph, source in processes": pipegraph_source,
        "pipegraph, processes, batches": pipegraph_batches,
        "pipegraph, threads": partial(pipegraph, backend="thread"),
        "DataLoader, processes": partial(peers.dataloader, batch_size=BATCH),
        "torchdata.nodes, processes": partial(torchdata_nodes, method="process"),
        "torchdata.nodes, threads": partial(torchdata_nodes, method="thread"),
        "SPDL, processes": spdl,
        "Grain, processes": grain,
    }
    timed = round(TIMED_S * 1e3 * WORKERS / item_ms / BATCH)
    warm = max(12, timed // 4)
    return [
        Contestant(name, partial(stream, transform), warm=warm, timed=timed, weight=BATCH)
        for name, stream in streams.items()
    ]


def check(transform: Transform, contestant: Contestant) -> str:
    """The first batch must be exactly that of the function."""
    import torch

    with contestant.stream() as stream:
        if not torch.equal(next(iter(stream)), transform.batch(0)):
            raise RuntimeError(f"{contestant.name}: other values than the function's")
    return "equal"


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--ms", default="2,0.1", help="how long an item takes, in milliseconds")
    options = parser.parse_args()
    one_thread_each()
    for item_ms in map(float, options.ms.split(",")):
        transform = calibrated(item_ms)
        configuration = {
            "item_ms": item_ms, "words": transform.words, "batch": BATCH, "workers": WORKERS,
            "prefetch_batches": PREFETCH,
        }  # fmt: skip
        entered = contestants(transform, item_ms)
        same, claim = partial(check, transform), CLAIMS.get(item_ms, "")
        harness.compare("python_transform", claim, configuration, entered, same, [IDEAL, OURS], options)


if __name__ == "__main__":
    main()
