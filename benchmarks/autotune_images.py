"""The image pipeline from one worker everywhere, beside the best of a grid and beside peers that were tuned.

Claim: at least 95 % of the best setting of a grid within 30 s, ahead of Grain's ``pick_performance_config`` and of a
DataLoader tuned by hand.

The tuner has ``--seconds``; its sizes are then fixed. The DataLoader gets the best of one, two and four workers, and
Grain the workers and the buffer that it picks. All are run in turn.

    python benchmarks/autotune_images.py --images FOLDER --seconds 30 --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice, product
from typing import Any

import harness
from image_decode import Photographs, limit_threads
from images import BATCH, SIZE, add_images_option, load, one_thread_each, photographs

import pipegraph as pg
from pipegraph import operators as ops

CLAIM = "at least 95 % of the best of a grid, ahead of Grain's own choice and of a tuned DataLoader"
OURS, BEST = "pipegraph, tuned by itself", "pipegraph, best of the grid"
DECODERS, QUEUES = (1, 2, 3, 4), (1, 2, 4)
WARM, TIMED = 6, 14  # batches

Stream = Callable[[], Any]


def graph_of(paths: Sequence[str], settings: Any = None) -> pg.Graph:
    """Files, batches of encoded samples, decoded in place."""
    graph = pg.Graph("photographs")
    samples = ({"key": str(i), "path": path} for i, path in enumerate(harness.Repeat(paths)))
    files = graph.add(ops.FromIterable(samples), name="list").then(ops.Load(), name="load")
    batches = files.then(ops.Batch(BATCH), name="batch", capacity=1)
    batches.then(ops.DecodeImage(SIZE, backend="opencv"), name="decode", capacity=1)
    graph.resize(settings or {})
    return graph


@contextmanager
def ours(paths: Sequence[str], settings: Any) -> Iterator[Any]:
    """With these sizes."""
    with graph_of(paths, settings).loader() as loader:
        yield loader


@contextmanager
def dataloader(paths: Sequence[str], workers: int) -> Iterator[Any]:
    """Persistent worker processes that collate into shared memory."""
    from torch.utils.data import DataLoader

    data: Any = Photographs(paths)
    made: Any = DataLoader(
        data, BATCH, num_workers=workers, persistent_workers=True, worker_init_fn=limit_threads
    )
    iterator = iter(made)
    yield iterator
    iterator._shutdown_workers()


@contextmanager
def grain(paths: Sequence[str]) -> Iterator[Any]:
    """With the workers and the buffer that it picks for 2 GB, as its documentation does."""
    import grain as gr
    from grain.experimental import pick_performance_config

    data = gr.MapDataset.source(list(paths)).repeat().map(load)
    chosen: Any = partial(pick_performance_config, ram_budget_mb=2048, max_workers=None, max_buffer_size=None)
    found = chosen(data.to_iter_dataset().batch(BATCH))
    made = data.to_iter_dataset(found.read_options).batch(BATCH).mp_prefetch(found.multiprocessing_options)
    iterator = iter(made)
    yield iterator
    iterator.close()


def rate(stream: Stream) -> float:
    """Images per second once it runs."""
    with stream() as batches:
        items = iter(batches)
        for _ in islice(items, WARM):
            pass
        begun = time.perf_counter()
        for _ in islice(items, TIMED):
            pass
        return TIMED * BATCH / (time.perf_counter() - begun)


def tune(paths: Sequence[str], seconds: float) -> pg.types.Tuning:
    """What the tuner finds in so many seconds."""
    with graph_of(paths).loader(autotune=True) as loader:
        begun = time.perf_counter()
        for _ in loader:
            if time.perf_counter() - begun > seconds:
                break
        return loader.tuning()


def main() -> None:
    """Print each one's rate as a part of the grid's best."""
    asked = argparse.ArgumentParser(description=__doc__)
    add_images_option(asked)
    asked.add_argument("--seconds", type=float, default=30.0)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--no-record", action="store_true", help="print only")
    options = asked.parse_args()
    paths = photographs(options.images)
    one_thread_each()
    found = tune(paths, options.seconds)
    print(found)
    grid = [
        {"decode": {"workers": n, "capacity": k}, "load": {"workers": m}}
        for n, k, m in product(DECODERS, QUEUES, (1, 2))
    ]
    best = max(grid, key=lambda settings: rate(partial(ours, paths, settings)))
    tuned = max((1, 2, 4), key=lambda workers: rate(partial(dataloader, paths, workers)))
    streams: dict[str, Stream] = {
        BEST: partial(ours, paths, best),
        OURS: partial(ours, paths, found.settings),
        f"DataLoader, tuned by hand: {tuned} workers": partial(dataloader, paths, tuned),
        "Grain, pick_performance_config": partial(grain, paths),
    }
    rates: dict[str, list[float]] = {name: [] for name in streams}
    for _ in range(options.rounds):
        for name, stream in streams.items():
            rates[name].append(rate(stream))
    results = {}
    for name, each in rates.items():
        parts = [one / base for one, base in zip(each, rates[BEST], strict=True)]
        results[name] = {
            "images/s": round(statistics.median(each), 1),
            "of the best": round(statistics.median(parts), 3),
            "from": round(min(parts), 3),
            "to": round(max(parts), 3),
        }
        print(f"{name}: {', '.join(f'{what} {value}' for what, value in results[name].items())}")
    print("best of the grid:", best)
    if not options.no_record:
        configuration = {"seconds": options.seconds, "rounds": options.rounds, "grid": len(grid)}
        print("recorded in", harness.record("autotune_images", CLAIM, configuration, results).name)


if __name__ == "__main__":
    main()
