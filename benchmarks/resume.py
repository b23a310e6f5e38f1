"""What it costs to continue in the middle of an epoch: from building a loader and loading its state to the next batch.

Claim: no row that was trained on is read again, so that a resume costs no more than a start.

40,000 shuffled rows, each about 0.1 ms of work without the GIL, in batches of 64 by 2 workers; stopped
after 312 batches, the middle of the epoch. Each contestant's next batch must be that of its run without a stop.
A ``DataLoader`` has no state: its way is to draw the batches again and drop them.

    python benchmarks/resume.py --rounds 5
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import harness
import torch
from harness import Clock, Measures
from images import WORKERS, one_thread_each
from peers import shut_down

CLAIM = "a resume in mid-epoch reads nothing again: it costs no more than a start"
OURS = "pipegraph, threads"
ROWS, BATCH, AT = 40_000, 64, 312
WORK = bytes(128 << 10)
SEED = 7

Opened = tuple[Iterator[Any], Callable[[], Any]]


class Rows:
    """A map-style dataset: row i is i, after some work."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        hashlib.sha256(WORK).digest()
        return int(index)


@dataclass
class Resuming:
    """A loader that is opened at its start (None) or from a state; gives its batches and a way to take a state."""

    name: str
    open: Callable[[Any], AbstractContextManager[Opened]]
    state: Any = None
    expected: list[int] = field(default_factory=list)

    def stop(self) -> str:
        """Run to the middle once: the state there, and the batch that comes next without a stop."""
        with self.open(None) as (batches, state):
            for _ in range(AT):
                next(batches)
            self.state = state()
            self.expected = [int(row) for row in next(batches)]
        self.measure()
        return f"the next batch is equal, from {self.expected[0]} on"

    def measure(self) -> Measures:
        """One resume.

        Raises:
            RuntimeError: the next batch is another.
        """
        gc.collect()
        clock = Clock()
        with self.open(self.state) as (batches, _):
            found = [int(row) for row in next(batches)]
            wall_s, cpu_s = clock.read()
        if found != self.expected:
            raise RuntimeError(f"resumed with {found[:3]}, expected {self.expected[:3]}")
        return harness.run(wall_s, cpu_s, 1)


@contextmanager
def ours(state: Any) -> Iterator[Opened]:
    import pipegraph as pg
    from pipegraph import operators as ops

    graph = pg.Graph("resume", seed=SEED)
    graph.add(ops.FromSequence(Rows(), shuffle=True), workers=WORKERS).then(ops.Batch(BATCH))
    with graph.loader() as loader:
        if state is not None:
            loader.load_state_dict(state)
        yield iter(loader), loader.state_dict


@contextmanager
def as_torchs(kind: Callable[..., Any], state: Any) -> Iterator[Opened]:
    """A loader with torch's arguments and a state."""
    loader = kind(Rows(), BATCH, shuffle=True, num_workers=WORKERS, generator=seeded())
    if state is not None:
        loader.load_state_dict(state)
    yield iter(loader), loader.state_dict


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def ours_in_place(state: Any) -> Any:
    import pipegraph as pg

    return as_torchs(pg.DataLoader, state)


def stateful(state: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return as_torchs(StatefulDataLoader, state)


@contextmanager
def dataloader(state: int | None) -> Iterator[Opened]:
    from torch.utils.data import DataLoader

    rows: Any = Rows()
    batches = iter(DataLoader(rows, BATCH, shuffle=True, num_workers=WORKERS, generator=seeded()))
    for _ in range(state or 0):
        next(batches)
    yield batches, lambda: AT


@contextmanager
def nodes(state: Any) -> Iterator[Opened]:
    from torch.utils.data import RandomSampler
    from torchdata import nodes as tn

    rows = Rows()
    node: Any = tn.SamplerWrapper(RandomSampler(rows, generator=seeded()))
    node = tn.ParallelMapper(node, rows.__getitem__, num_workers=WORKERS, method="thread")
    loader: Any = tn.Loader(tn.Prefetcher(tn.Batcher(node, BATCH, drop_last=False), prefetch_factor=2))
    if state is not None:
        loader.load_state_dict(state)
    yield iter(loader), loader.state_dict
    shut_down(loader)


@contextmanager
def grain(state: Any) -> Iterator[Opened]:
    import grain as gr

    options = gr.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=2 * BATCH)
    rows: Any = Rows()
    batches = iter(gr.MapDataset.source(rows).shuffle(seed=SEED).to_iter_dataset(options).batch(BATCH))
    if state is not None:
        batches.set_state(state)
    yield batches, batches.get_state


def main() -> None:
    options = harness.arguments(__doc__).parse_args()
    one_thread_each()
    ways = {
        OURS: ours,
        "pipegraph, DataLoader": ours_in_place,
        "DataLoader, batches drawn again": dataloader,
        "StatefulDataLoader": stateful,
        "torchdata.nodes, threads": nodes,
        "Grain": grain,
    }
    configuration = {"rows": ROWS, "batch": BATCH, "stopped after": AT, "workers": WORKERS}
    contestants = [Resuming(name, way) for name, way in ways.items()]
    harness.compare("resume", CLAIM, configuration, contestants, Resuming.stop, (OURS,), options)


if __name__ == "__main__":
    main()
