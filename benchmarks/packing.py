"""Documents of tokens packed into rows of 2,048, in batches of 8: tokens per second, and how full the rows are.

Claim: ahead of Grain's packing in both, cut end to end and of whole documents.

Documents are int32, lognormal (median 400, at most 2,048), slices of one array in memory. Rows bring segment ids and
positions. Every contestant works in the consumer's process; what ``end to end`` and ``whole`` contestants
make is compared with the documents first: each token once, with its document.

    python benchmarks/packing.py --rounds 5
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import harness
import numpy as np
from harness import Contestant
from images import one_thread_each

CLAIM = "packing: tokens per second and fill ahead of Grain's"
IDEAL = "hand-written loop, end to end"
OURS = "pipegraph, end to end"
LENGTH = 2048
BATCH = 8
WINDOW = 256
GRAIN_BINS = 64
DOCUMENTS = 200_000


class Documents:
    """Document i, over and over: tokens that say which document they are of."""

    def __init__(self) -> None:
        sizes = np.random.default_rng(0).lognormal(6, 1, DOCUMENTS).astype(np.int64).clip(1, LENGTH)
        self.ends = np.cumsum(sizes)
        self.starts = (self.ends - sizes).tolist()
        self.sizes = sizes.tolist()
        self.tokens = np.repeat(np.arange(DOCUMENTS, dtype=np.int32), sizes)

    def __len__(self) -> int:
        return DOCUMENTS

    def __getitem__(self, index: int) -> Any:
        index %= DOCUMENTS
        start = self.starts[index]
        return {"tokens": self.tokens[start : start + self.sizes[index]]}


@contextmanager
def hand_written(documents: Documents) -> Iterator[Any]:
    """One thread, no queue: fill a batch's arrays row by row."""
    import torch

    def batches() -> Iterator[Any]:
        iota = np.arange(LENGTH, dtype=np.int32)
        number = used = 0
        tokens = documents[0]["tokens"]
        while True:
            out = [np.empty((BATCH, LENGTH), np.int32) for _ in range(3)]
            for row, segments, positions in zip(*out, strict=True):
                at, segment = 0, 1
                while at < LENGTH:
                    if used == len(tokens):
                        number, used = number + 1, 0
                        tokens = documents[number]["tokens"]
                    count = min(LENGTH - at, len(tokens) - used)
                    row[at : at + count] = tokens[used : used + count]
                    segments[at : at + count] = segment
                    positions[at : at + count] = iota[:count]
                    at, used, segment = at + count, used + count, segment + 1
            names = ("tokens", "segment_ids", "position_ids")
            yield {name: torch.from_numpy(array) for name, array in zip(names, out, strict=True)}

    yield batches()


@contextmanager
def pipegraph(documents: Documents, method: Any) -> Iterator[Any]:
    """A source, the packing, a batch: a thread each."""
    import pipegraph as pg
    from pipegraph import operators as ops

    graph = pg.Graph("packing")
    rows = graph.add(ops.FromSequence(documents)).then(ops.Pack(LENGTH, method, window=WINDOW))
    rows.then(ops.Batch(BATCH), capacity=4)
    with graph.loader(epochs=None) as loader:
        yield (batch for _ in iter(int, 1) for batch in loader)


@contextmanager
def grain(documents: Documents, method: str) -> Iterator[Any]:
    """Its own packing, batched; without read threads, which cost more here than they save."""
    import grain as gr
    import torch
    from grain.experimental import BestFitPackIterDataset, ConcatThenSplitIterDataset, FirstFitPackIterDataset

    source: Any = gr.MapDataset.source(documents).repeat()
    data = source.to_iter_dataset(gr.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    sizes = {"tokens": LENGTH}
    if method == "split":
        packed: Any = ConcatThenSplitIterDataset(data, length_struct=sizes)
    else:
        kind = BestFitPackIterDataset if method == "best" else FirstFitPackIterDataset
        packed = kind(data, length_struct=sizes, num_packing_bins=GRAIN_BINS, shuffle_bins=False)
    iterator = iter(packed.batch(BATCH))
    names = {"tokens": "tokens", "tokens_segment_ids": "segment_ids", "tokens_positions": "position_ids"}
    yield ({name: torch.from_numpy(batch[ours]) for ours, name in names.items()} for batch in iterator)
    iterator.close()


def contestants(documents: Documents, scale: float = 1.0) -> list[Contestant]:
    """All ways to pack."""

    def entry(name: str, stream: Any, timed: int, *how: str) -> Contestant:
        count = max(2, int(timed * scale))
        return Contestant(
            name, partial(stream, documents, *how), warm=count // 5, timed=count, weight=BATCH * LENGTH
        )

    return [
        entry(IDEAL, hand_written, 2000),
        entry(OURS, pipegraph, 2000, "split"),
        entry("pipegraph, whole", pipegraph, 2000, "fit"),
        entry("Grain, end to end", grain, 400, "split"),
        entry("Grain, whole, best fit", grain, 400, "best"),
        entry("Grain, whole, first fit", grain, 400, "first"),
    ]


def check(contestant: Contestant, documents: Documents, batches: int = 250) -> str:
    """Segments are of one document each, positions count in them; returns how full the rows are."""
    used = total = 0
    with contestant.stream() as stream:
        for _, batch in zip(range(batches), stream, strict=False):
            for tokens, segments, positions in zip(
                *(batch[name].numpy() for name in ("tokens", "segment_ids", "position_ids")), strict=True
            ):
                filled = segments > 0
                used, total = used + int(filled.sum()), total + LENGTH
                begins = np.flatnonzero(np.diff(segments[filled], prepend=0))
                sizes = np.diff(np.append(begins, filled.sum()))
                same = np.repeat(tokens[begins], sizes) == tokens[filled]
                if not same.all():
                    raise RuntimeError(f"{contestant.name}: a segment holds tokens of two documents")
                counted = np.arange(filled.sum()) - np.repeat(begins, sizes)
                if "whole" in contestant.name and not np.array_equal(counted, positions[filled]):
                    raise RuntimeError(f"{contestant.name}: positions do not count from 0 in each segment")
    return f"fill {used / total:.4f}"


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of timed batches")
    options = parser.parse_args()
    one_thread_each()
    configuration = {
        "length": LENGTH, "batch": BATCH, "documents": DOCUMENTS, "window": WINDOW, "grain_bins": GRAIN_BINS,
        "rounds": options.rounds,
    }  # fmt: skip
    documents = Documents()
    entered = contestants(documents, options.scale)
    harness.compare(
        "packing",
        CLAIM,
        configuration,
        entered,
        partial(check, documents=documents),
        [IDEAL, OURS],
        "tokens",
        options,
    )


if __name__ == "__main__":
    main()
