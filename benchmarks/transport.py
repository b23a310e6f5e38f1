"""What it costs to bring an item from a worker process: 32 MB of arrays, and small items.

Claim: arrays cross at 0.8 of one memory copy's bandwidth at least, 1.5 times as fast as DataLoader's and ahead of SPDL
and Grain; small items no slower than DataLoader's.

    python benchmarks/transport.py --rounds 5

One worker process hands out the same item again and again, so that nothing but the way is timed; with new tensors each
time, for torch would share those that it has shared before without a copy. The yardstick of large items is a loop that
gets such items and makes one copy of each, over as many target buffers as a ring would have; that of small ones is
DataLoader.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import harness
import numpy as np
from harness import Contestant
from images import one_thread_each

CLAIM_LARGE = "32 MB items: >= 0.8 of one memory copy, >= 1.5 x DataLoader, ahead of SPDL and Grain"
CLAIM_SMALL = "small items: no slower than DataLoader"
COPY, DATALOADER, GRAIN = "one memory copy", "DataLoader, 1 process", "Grain, 1 process"
ENDLESS = 1 << 30
MB = 1 << 20
BUFFERED = 4
ROWS = 64


def one_array() -> Any:
    """32 MB of float32 in one NumPy array."""
    return np.arange(8 * MB, dtype=np.float32)


def tree() -> Any:
    """32 MB of torch tensors, in a tree."""
    import torch

    return {
        "image": torch.arange(24 * MB // 4, dtype=torch.float32).reshape(64, -1),
        "more": (torch.arange(8 * MB // 8).reshape(64, -1), torch.zeros(64)),
    }


def small() -> Any:
    """A row of three small arrays and a number."""
    import torch

    return {"x": torch.arange(64.0), "y": np.arange(16), "z": torch.zeros(3, 8), "label": 3}


def fresh(item: Any) -> Any:
    """The item with new tensors."""
    import torch

    from pipegraph.tree import map_leaves

    return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, item)


class Same:
    """A map-style dataset whose items are all alike; made where it is read."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.item: Any = None

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        if self.item is None:
            self.item = self.make()
        return fresh(self.item)


def arrays(item: Any) -> Any:
    """The item with NumPy arrays in place of tensors."""
    from pipegraph.tree import map_leaves

    return map_leaves(lambda leaf: leaf.numpy() if hasattr(leaf, "numpy") else leaf, item)


class SameArrays(Same):
    """The same in NumPy arrays."""

    def __getitem__(self, index: int) -> Any:
        if self.item is None:
            self.item = arrays(self.make())
        return self.item


class Stream(Same):
    """The same as an iterable."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(ENDLESS):
            yield self[index]


@contextmanager
def copies(make: Callable[[], Any]) -> Iterator[Iterable[Any]]:
    """Hand-written: one copy of each item, into one of a few buffers in turn."""
    from pipegraph.tree import leaves

    items = Same(make)
    targets = [[np.array(leaf, copy=True) for leaf in leaves(arrays(make()))] for _ in range(BUFFERED)]

    def run() -> Iterator[Any]:
        for number in range(ENDLESS):
            target = targets[number % BUFFERED]
            for into, leaf in zip(target, leaves(items[number]), strict=True):
                np.copyto(into, leaf)
            yield target

    yield run()


@contextmanager
def pipegraph(make: Callable[[], Any]) -> Iterator[Iterable[Any]]:
    """A dataset read in one process."""
    import pipegraph as pg
    from pipegraph import operators as ops

    graph = pg.Graph("transport")
    graph.add(ops.FromSequence(Same(make)), backend="process", capacity=BUFFERED)
    with graph.loader() as loader:
        yield loader


@contextmanager
def pipegraph_rows(make: Callable[[], Any]) -> Iterator[Iterable[Any]]:
    """A dataset read in one process, and a batch of ``ROWS`` behind it that leaves its rows as they are."""
    import pipegraph as pg
    from pipegraph import operators as ops

    graph = pg.Graph("transport")
    rows = graph.add(ops.FromSequence(Same(make)), backend="process")
    rows.then(ops.Batch(ROWS, collate=list))
    with graph.loader() as loader:
        yield (row for batch in loader for row in batch)


@contextmanager
def dataloader(make: Callable[[], Any]) -> Iterator[Iterable[Any]]:
    """Samples as they are, from one process."""
    from torch.utils.data import DataLoader

    data: Any = Same(make)
    loader: Any = DataLoader(data, batch_size=None, num_workers=1, prefetch_factor=BUFFERED)
    iterator = iter(loader)
    yield iterator
    iterator._shutdown_workers()


@contextmanager
def spdl(make: Callable[[], Any], arena: bool) -> Iterator[Iterable[Any]]:
    """Its iteration in a subprocess: with its arena of segments, or with a queue alone."""
    from spdl.pipeline import SharedMemorySegmentPool, iterate_in_subprocess

    pool = SharedMemorySegmentPool(34 * MB, BUFFERED + 2) if arena else None
    source = iterate_in_subprocess(partial(Stream, make), buffer_size=BUFFERED, mp_context="fork", arena=pool)
    iterator = iter(source)
    yield iterator
    del iterator, source


@contextmanager
def grain(make: Callable[[], Any]) -> Iterator[Iterable[Any]]:
    """A map dataset prefetched in one process. Its shared memory is for NumPy arrays: tensors go as such."""
    import grain as gr

    data = gr.MapDataset.range(ENDLESS).map(SameArrays(make).__getitem__)
    read = gr.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    processes = gr.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=BUFFERED)
    iterator = iter(data.to_iter_dataset(read).mp_prefetch(processes))
    yield iterator
    iterator.close()


def contestants(make: Callable[[], Any], large: bool) -> list[Contestant]:
    """All ways across."""
    streams: dict[str, Callable[[Callable[[], Any]], AbstractContextManager[Any]]] = {
        **({COPY: copies} if large else {"pipegraph, 1 process, batched": pipegraph_rows}),
        "pipegraph, 1 process": pipegraph,
        DATALOADER: dataloader,
        "SPDL, subprocess with arena": partial(spdl, arena=True),
        "SPDL, subprocess": partial(spdl, arena=False),
        GRAIN: grain,
    }
    warm, timed, weight = (20, 80, 32.0) if large else (1000, 10_000, 1.0)
    return [Contestant(name, partial(s, make), warm, timed, weight) for name, s in streams.items()]


def check(make: Callable[[], Any], contestant: Contestant) -> str:
    """The first item must be the item."""
    from pipegraph.testing.outcome import fingerprint
    from pipegraph.tree import leaves

    with contestant.stream() as stream:
        item = next(iter(stream))
    # DataLoader makes tensors of arrays and lists of tuples, and Grain is given arrays.
    if contestant.name != COPY and fingerprint(list(leaves(arrays(item)))) != fingerprint(
        list(leaves(arrays(make())))
    ):
        raise RuntimeError(f"{contestant.name}: another item")
    return "equal"


def run(name: str, make: Callable[[], Any], large: bool, options: argparse.Namespace) -> None:
    """One comparison."""
    configuration = {"item": name, "processes": 1, "buffered": BUFFERED, "rounds": options.rounds}
    claim = CLAIM_LARGE if large else CLAIM_SMALL
    yardsticks = [COPY, DATALOADER] if large else [DATALOADER]
    unit = "MB" if large else "items"
    harness.compare(
        "transport", claim, configuration, contestants(make, large), partial(check, make), yardsticks, unit, options
    )  # fmt: skip


ITEMS: dict[str, tuple[Callable[[], Any], bool]] = {
    "numpy array of 32 MB": (one_array, True),
    "torch tree of 32 MB": (tree, True),
    "small row": (small, False),
}


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--item", default="", help="part of an item's name")
    options = parser.parse_args()
    one_thread_each()
    for name, (make, large) in ITEMS.items():
        if options.item in name:
            run(name, make, large, options)


if __name__ == "__main__":
    main()
