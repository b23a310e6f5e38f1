"""A million rows of 32 floats, shuffled, in batches of 1024: the loader's own cost, with no work to hide it.

Claim: ahead of every peer, row by row and batch by batch.

Two ways to ask: "rows" asks the dataset for one row at a time and collates, as most datasets are
written; "batches" asks it for a list of indices at once, as each library's documentation recommends for
rows in memory.

    python benchmarks/small_rows.py --rounds 5
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import harness
import numpy as np
import peers
from harness import Contestant, loaded
from images import WORKERS, one_thread_each
from peers import PREFETCH

CLAIM = "ahead of every peer, row by row and batch by batch"
IDEAL = "hand-written, batches"
OURS = "pipegraph, batches"
ROWS = 1_000_000
COLUMNS = 32
BATCH = 1024
PASSES = 1000  # more than any contestant draws


class Rows:
    """The table. An index gives a row; a list of indices gives their batch."""

    def __init__(self) -> None:
        import torch

        self.table = torch.from_numpy(np.random.default_rng(0).random((ROWS, COLUMNS), np.float32))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: Any) -> Any:
        return self.table[index]


class Endless:
    """Lists of shuffled indices, pass after pass; or the indices one by one."""

    def __init__(self, batches: bool) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        for epoch in range(PASSES):
            order = np.random.default_rng(epoch).permutation(ROWS)
            for start in range(0, ROWS - BATCH + 1, BATCH):
                found = order[start : start + BATCH].tolist()
                if self.batches:
                    yield found
                else:
                    yield from found

    def __len__(self) -> int:
        return PASSES * (ROWS // BATCH) * (1 if self.batches else BATCH)


def hand_written(rows: Rows) -> Any:
    """One thread, no queue: index and yield."""
    return nullcontext(rows[indices] for indices in Endless(True))


def pipegraph(rows: Rows, batches: bool) -> Any:
    """A sampler of index lists, read in two worker threads; or of indices, then a batch."""
    import pipegraph as pg
    from pipegraph import operators as ops

    sampler: Any = Endless(batches)
    capacity = PREFETCH if batches else BATCH
    source = pg.Graph("rows").add(ops.FromSequence(rows, sampler=sampler), workers=WORKERS, capacity=capacity)
    return loaded(source if batches else source.then(ops.Batch(BATCH), capacity=PREFETCH))


def asked(batches: bool) -> dict[str, Any]:
    """How a DataLoader is asked; batches: a sampler of index lists with ``batch_size=None``."""
    if batches:
        return {"sampler": Endless(True), "batch_size": None}
    return {"sampler": Endless(False), "batch_size": BATCH}


def dataloader(rows: Rows, batches: bool) -> Any:
    """Two persistent processes."""
    return peers.dataloader(rows, **asked(batches))


def dataloader_inline(rows: Rows, batches: bool) -> Any:
    """No worker: the same in the consumer's own process."""
    from torch.utils.data import DataLoader

    data: Any = rows
    return nullcontext(iter(DataLoader(data, **asked(batches))))


def torchdata_nodes(rows: Rows, batches: bool) -> Any:
    """Index lists, or indices batched; read and collated in two threads."""
    from torch.utils.data import default_collate

    if batches:
        return peers.nodes(Endless(True), rows.__getitem__)
    return peers.nodes(Endless(False), lambda found: default_collate([rows[i] for i in found]), batch=BATCH)


def spdl(rows: Rows) -> Any:
    """A list of indices per task."""
    return peers.spdl(Endless(True), rows.__getitem__)


def grain(rows: Rows) -> Any:
    """Its own shuffle, a row at a time, batched in two read threads (it has no call for many rows)."""
    from grain import MapDataset

    source: Any = rows.table.numpy()
    return peers.grain(MapDataset.source(source).seed(0).shuffle().repeat().batch(BATCH))


def contestants(rows: Rows) -> list[Contestant]:
    """All ways to read the table; those that go row by row draw fewer batches."""

    def entry(name: str, stream: Any, timed: int) -> Contestant:
        return Contestant(name, partial(stream, rows), warm=max(20, timed // 10), timed=timed, weight=BATCH)

    return [
        entry(IDEAL, hand_written, 3000),
        entry(OURS, partial(pipegraph, batches=True), 2000),
        entry("pipegraph, rows", partial(pipegraph, batches=False), 200),
        entry("DataLoader, batches", partial(dataloader, batches=True), 1000),
        entry("DataLoader, batches, no worker", partial(dataloader_inline, batches=True), 2000),
        entry("DataLoader, rows", partial(dataloader, batches=False), 200),
        entry("DataLoader, rows, no worker", partial(dataloader_inline, batches=False), 200),
        entry("torchdata.nodes, batches", partial(torchdata_nodes, batches=True), 1000),
        entry("torchdata.nodes, rows", partial(torchdata_nodes, batches=False), 200),
        entry("SPDL, batches", spdl, 500),
        entry("Grain, rows", grain, 100),
    ]


def check(contestant: Contestant) -> str:
    """The mean of the first batch; a wrong shape or type is an error."""
    import torch

    with contestant.stream() as stream:
        batch = next(iter(stream))
        if tuple(batch.shape) != (BATCH, COLUMNS) or batch.dtype != torch.float32:
            raise RuntimeError(f"{contestant.name}: got {tuple(batch.shape)} {batch.dtype}")
        return f"mean {batch.mean().item():.3f}"


def main() -> None:
    options = harness.arguments(__doc__).parse_args()
    one_thread_each()
    configuration = {
        "rows": ROWS, "columns": COLUMNS, "batch": BATCH, "workers": WORKERS, "prefetch_batches": PREFETCH
    }  # fmt: skip
    harness.compare("small_rows", CLAIM, configuration, contestants(Rows()), check, [IDEAL, OURS], options)


if __name__ == "__main__":
    main()
