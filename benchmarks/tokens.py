"""Windows of 2,049 tokens from one long array on disk, in batches of 16: what language-model training reads.

Claim: ahead of every peer. A batch is int64 (16, 2049), cut at scattered places of a memory-mapped
uint16 file of 100 million tokens.

    python benchmarks/tokens.py --rounds 5
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import peers
from harness import Contestant, loaded
from images import WORKERS, one_thread_each
from peers import PREFETCH

CLAIM = "windows of tokens: ahead of every peer"
IDEAL = "hand-written loop"
OURS = "pipegraph, batches"
SOURCE = "pipegraph, FromTokens"
TOKENS = 100_000_000
WINDOW = 2049
BATCH = 16
ENDLESS = 1 << 40


def write(folder: str) -> str:
    """The file; returns its path."""
    path = str(Path(folder) / "tokens.bin")
    np.random.default_rng(0).integers(0, 50_000, TOKENS, np.uint16).tofile(path)
    return path


class Windows:
    """Window i of the file, at a place drawn from i; a list of indices gives their batch."""

    def __init__(self, path: str) -> None:
        self.tokens = np.memmap(path, np.uint16, mode="r")

    def __len__(self) -> int:
        return 1 << 30

    def start(self, index: int) -> int:
        """A fixed scatter of the indices over the file (Knuth's multiplicative hash)."""
        return (index * 2_654_435_761) % (len(self.tokens) - WINDOW)

    def __getitem__(self, index: int) -> Any:
        start = self.start(index)
        return self.tokens[start : start + WINDOW].astype(np.int64)

    def batch(self, indices: Sequence[int]) -> Any:
        """int64 (len(indices), WINDOW), every token written once."""
        import torch

        out = np.empty((len(indices), WINDOW), np.int64)
        for row, index in enumerate(indices):
            start = self.start(index)
            out[row] = self.tokens[start : start + WINDOW]
        return torch.from_numpy(out)


def hand_written(windows: Windows) -> Any:
    """One thread, no queue: cut and yield."""
    return nullcontext(windows.batch(range(start, start + BATCH)) for start in range(0, ENDLESS, BATCH))


def pipegraph_batches(windows: Windows) -> Any:
    """Indices batched by the workers that take them, then a function on the batch in two of these."""
    import pipegraph as pg
    from pipegraph import operators as ops

    indices = pg.Graph("tokens").add(ops.FromIterable(range(ENDLESS)), capacity=BATCH * PREFETCH)
    lists = indices.then(ops.Batch(BATCH, collate=list), backend="inline", capacity=PREFETCH)
    return loaded(lists.then(ops.Map(windows.batch), workers=WORKERS, capacity=PREFETCH))


def pipegraph_windows(windows: Windows) -> Any:
    """The plain way: a dataset, then a batch."""
    import pipegraph as pg
    from pipegraph import operators as ops

    source = pg.Graph("tokens").add(ops.FromSequence(windows), workers=WORKERS, capacity=BATCH * PREFETCH)
    return loaded(source.then(ops.Batch(BATCH), capacity=PREFETCH))


@contextmanager
def pipegraph_tokens(windows: Windows) -> Iterator[Any]:
    """The source for such files: each batch is gathered in one index operation. Windows lie end to end, shuffled."""
    import torch

    import pipegraph as pg
    from pipegraph import operators as ops

    graph = pg.Graph("tokens")
    source = ops.FromTokens(windows.tokens, WINDOW, shuffle=True)
    graph.add(source, workers=WORKERS, capacity=BATCH * PREFETCH).then(ops.Batch(BATCH), capacity=PREFETCH)
    with graph.loader(epochs=None) as loader:
        yield (batch["tokens"].to(torch.int64) for _ in iter(int, 1) for batch in loader)


def spdl(windows: Windows) -> Any:
    """A batch per task; the indices are grouped before the event loop sees them."""
    lists = (range(start, start + BATCH) for start in range(0, ENDLESS, BATCH))
    return peers.spdl(lists, windows.batch)


def grain(windows: Windows) -> Any:
    """Batched in two read threads."""
    from grain import MapDataset

    return peers.grain(MapDataset.range(1 << 30).map(windows.__getitem__).batch(BATCH))


def torchdata_nodes(windows: Windows) -> Any:
    """A batch per task."""
    return peers.nodes(range(ENDLESS), windows.batch, batch=BATCH)


def contestants(windows: Windows) -> list[Contestant]:
    """All ways to cut the windows."""

    def entry(name: str, stream: Any, timed: int) -> Contestant:
        return Contestant(
            name, partial(stream, windows), warm=timed // 10, timed=timed, weight=BATCH * WINDOW
        )

    return [
        entry(IDEAL, hand_written, 5000),
        entry(OURS, pipegraph_batches, 4000),
        entry("pipegraph, windows", pipegraph_windows, 2000),
        entry(SOURCE, pipegraph_tokens, 4000),
        entry("DataLoader", partial(peers.dataloader, batch_size=BATCH), 1000),
        entry("torchdata.nodes", torchdata_nodes, 2000),
        entry("SPDL", spdl, 1000),
        entry("Grain", grain, 1000),
    ]


def check(contestant: Contestant, windows: Windows) -> str:
    """The first batch must be exactly the first windows; of ``FromTokens``, windows of the file."""
    import torch

    with contestant.stream() as stream:
        batch = next(iter(stream))
        if contestant.name == SOURCE:
            whole = windows.tokens[: len(windows.tokens) // WINDOW * WINDOW].reshape(-1, WINDOW)
            for row in batch.numpy():
                found = whole[(whole[:, :4] == row[:4]).all(axis=1)]
                if batch.dtype != torch.int64 or not (found == row).all(axis=1).any():
                    raise RuntimeError(f"{contestant.name}: got {batch.dtype} that are no window of the file")
            return "windows of the file"
        if not torch.equal(batch, windows.batch(range(BATCH))):
            raise RuntimeError(f"{contestant.name}: got {tuple(batch.shape)} {batch.dtype}, other tokens")
    return "equal"


def main() -> None:
    options = harness.arguments(__doc__).parse_args()
    one_thread_each()
    configuration = {
        "tokens": TOKENS, "window": WINDOW, "batch": BATCH, "workers": WORKERS, "prefetch_batches": PREFETCH
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        windows = Windows(write(folder))
        same = partial(check, windows=windows)
        harness.compare("tokens", CLAIM, configuration, contestants(windows), same, [IDEAL, OURS], options)


if __name__ == "__main__":
    main()
