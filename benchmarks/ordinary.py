"""Ordinary jobs, written as the documentation tells a newcomer to, against what the newcomer would use instead.

Claim: ahead of what a user would pick instead, in rate and in CPU time, on text from shards, Parquet, tables, tokens
and single rows. Every contestant delivers one whole epoch of the same rows; the sums of what it delivered are compared.

    python benchmarks/ordinary.py --rounds 5
    python benchmarks/ordinary.py --jobs parquet,table
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import Run, cpu_seconds, spent_s

CLAIM = "ordinary jobs: ahead of what a user would pick instead, in rate and in CPU"
OURS = "pipegraph"

DOCUMENTS, SHARDS = 20_000, 8
ROWS, COLUMNS, BATCH = 1_000_000, 5, 256
TOKENS, WINDOW = 20_000_000, 1025
SINGLES = 1_000_000

Delivered = tuple[int, float]
"""(rows, sum of what they hold)."""


@dataclass(frozen=True)
class Way:
    """One way to do a job: ``epoch()`` delivers all rows once."""

    name: str
    epoch: Callable[[], Delivered]
    rows: int

    def measure(self) -> Run:
        gc.collect()
        cpu, start = cpu_seconds(), time.perf_counter()
        rows, _ = self.epoch()
        wall_s = time.perf_counter() - start
        return Run(wall_s, max(spent_s(cpu, cpu_seconds()), 1e-9) + _ended_s.take(), float(rows))


class _Ended:
    """CPU seconds of worker processes that ended inside a run: those of children that were waited for."""

    def __init__(self) -> None:
        self._last = self._now()

    def _now(self) -> float:
        import resource

        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def take(self) -> float:
        now = self._now()
        spent, self._last = now - self._last, now
        return spent


_ended_s = _Ended()


# -- text: JSON lines in shards, and a tokenizer ---------------------------------------------------------------


def tokenize(text: str) -> np.ndarray:
    """A tokenizer in Python of about 90 us for 1.4 kB: whitespace, a hash for each word."""
    found = [hash_of(word) for word in text.split()]
    return np.array(found[:256] + [0] * (256 - len(found)), np.int64)


def hash_of(word: str) -> int:
    value = 5381
    for letter in word[:2]:
        value = (value * 33 + ord(letter)) & 0xFFFF
    return value


def tokenized(sample: dict[str, Any]) -> dict[str, Any]:
    """What a user writes for pipegraph."""
    return {"tokens": tokenize(sample["text"])}


def write_documents(folder: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    words = [f"word{number}" for number in range(5000)]
    paths = []
    for shard in range(SHARDS):
        path = folder / f"part-{shard:05}.jsonl"
        with path.open("w") as file:
            for number in range(DOCUMENTS // SHARDS):
                text = " ".join(words[at] for at in rng.integers(0, len(words), 165))
                file.write(json.dumps({"id": shard * 100_000 + number, "text": text}) + "\n")
        paths.append(path)
    return paths


class Lines:
    """The usual map-style dataset over JSON lines: offsets once, then seek and parse."""

    def __init__(self, paths: list[Path]) -> None:
        self.where = []
        for path in paths:
            offset = 0
            with path.open("rb") as file:
                for line in file:
                    self.where.append((path, offset))
                    offset += len(line)
        self.files: dict[Path, Any] = {}

    def __len__(self) -> int:
        return len(self.where)

    def __getitem__(self, index: int) -> Any:
        path, offset = self.where[index]
        file = self.files.get(path)
        if file is None:
            file = self.files[path] = path.open("rb")
        file.seek(offset)
        return tokenize(json.loads(file.readline())["text"])


def text_jobs(folder: Path) -> Iterable[Way]:
    paths = write_documents(folder)

    def ours() -> Delivered:
        import pipegraph as pg
        from pipegraph import operators as ops

        graph = pg.Graph("text")
        samples = graph.add(ops.ShardSelect(str(folder / "part-*.jsonl"))).then(ops.Load())
        samples.then(tokenized, workers=2, backend="process").then(ops.Batch(64))
        with graph.loader() as loader:
            return added(batch["tokens"] for batch in loader)

    def dataloader() -> Delivered:
        from torch.utils.data import DataLoader

        return added(DataLoader(Lines(paths), batch_size=64, shuffle=True, num_workers=2))  # type: ignore[arg-type]

    yield Way(OURS, ours, DOCUMENTS)
    yield Way("DataLoader, 2 processes", dataloader, DOCUMENTS)


def added(batches: Iterable[Any]) -> Delivered:
    """Rows and their sum."""
    rows, total = 0, 0.0
    for batch in batches:
        rows += len(batch)
        total += float(batch[:, :16].sum())  # a part: a sum of many numbers starts torch's threads
    return rows, total


# -- Parquet shards and a table --------------------------------------------------------------------------------


def write_table(folder: Path) -> list[Path]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    paths = []
    for shard in range(SHARDS):
        columns = {f"x{at}": rng.random(ROWS // SHARDS) for at in range(COLUMNS - 1)}
        columns["label"] = rng.integers(0, 10, ROWS // SHARDS)
        path = folder / f"part-{shard:05}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=25_000)
        paths.append(path)
    return paths


def summed(batches: Iterable[dict[str, Any]]) -> Delivered:
    """Rows, and the sum of two of the columns."""
    rows, total = 0, 0.0
    for batch in batches:
        rows += len(batch["label"])
        total += float(batch["label"].sum()) + float(batch["x0"].sum())
    return rows, round(total, 3)


def by_take(folder: Path) -> Iterator[dict[str, Any]]:
    """The loop that people write: all of it in memory, each batch taken from all over the table."""
    import pyarrow.parquet as pq
    import torch

    table = pq.read_table(folder)
    order = np.random.default_rng(0).permutation(table.num_rows)
    for start in range(0, table.num_rows, BATCH):
        rows = table.take(order[start : start + BATCH])
        yield {name: torch.from_numpy(rows[name].to_numpy()) for name in rows.column_names}


def by_groups(paths: list[Path]) -> Iterator[dict[str, Any]]:
    """The least there is to do: a row group at a time, its rows shuffled, sliced into batches."""
    import pyarrow.parquet as pq
    import torch

    rng = np.random.default_rng(0)
    groups = [(path, group) for path in paths for group in range(pq.ParquetFile(path).num_row_groups)]
    for at in rng.permutation(len(groups)):
        path, group = groups[at]
        table = pq.ParquetFile(path).read_row_group(group)
        order = rng.permutation(table.num_rows)
        columns = {name: torch.from_numpy(table[name].to_numpy()[order]) for name in table.column_names}
        for start in range(0, table.num_rows, BATCH):
            yield {name: column[start : start + BATCH] for name, column in columns.items()}


def parquet_jobs(folder: Path) -> Iterable[Way]:
    paths = write_table(folder)

    def ours() -> Delivered:
        import pipegraph as pg
        from pipegraph import operators as ops

        graph = pg.Graph("parquet")
        graph.add(ops.ShardSelect(str(folder / "part-*.parquet"))).then(ops.Load()).then(ops.Batch(BATCH))
        with graph.loader() as loader:
            return summed(loader)

    def hugging_face() -> Delivered:
        from datasets import load_dataset
        from torch.utils.data import DataLoader

        data = load_dataset("parquet", data_files=[str(path) for path in paths], split="train").with_format(
            "torch"
        )
        return summed(DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=2))

    yield Way(OURS, ours, ROWS)
    yield Way("pyarrow, table.take for each batch", lambda: summed(by_take(folder)), ROWS)
    yield Way("pyarrow, a row group at a time", lambda: summed(by_groups(paths)), ROWS)
    yield Way("Hugging Face, 2 processes", hugging_face, ROWS)


def table_jobs(folder: Path) -> Iterable[Way]:
    import pyarrow.parquet as pq

    paths = write_table(folder)
    table = pq.read_table(folder)

    def ours() -> Delivered:
        import pipegraph as pg
        from pipegraph import operators as ops

        graph = pg.Graph("table")
        graph.add(ops.FromTable(table, shuffle=True)).then(ops.Batch(BATCH))
        with graph.loader() as loader:
            return summed(loader)

    yield Way(OURS, ours, ROWS)
    yield Way("pyarrow, table.take for each batch", lambda: summed(by_take(folder)), ROWS)
    yield Way("pyarrow, a row group at a time", lambda: summed(by_groups(paths)), ROWS)


# -- tokens ----------------------------------------------------------------------------------------------------


class Windows:
    """The usual dataset over a memory-mapped file of tokens."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, np.uint16, mode="r")

    def __len__(self) -> int:
        return len(self.tokens) // WINDOW

    def __getitem__(self, index: int) -> Any:
        start = index * WINDOW
        return self.tokens[start : start + WINDOW].astype(np.int64)


def token_jobs(folder: Path) -> Iterable[Way]:
    path = folder / "tokens.bin"
    np.random.default_rng(0).integers(0, 50_000, TOKENS, np.uint16).tofile(path)
    count = TOKENS // WINDOW

    def ours() -> Delivered:
        import pipegraph as pg
        from pipegraph import operators as ops

        graph = pg.Graph("tokens")
        tokens = np.memmap(path, np.uint16, mode="r")
        graph.add(ops.FromTokens(tokens, window=WINDOW, shuffle=True)).then(ops.Batch(32))
        with graph.loader() as loader:
            return added(batch["tokens"].long() for batch in loader)

    def dataloader() -> Delivered:
        from torch.utils.data import DataLoader

        return added(DataLoader(Windows(path), batch_size=32, shuffle=True))  # type: ignore[arg-type]

    yield Way(OURS, ours, count)
    yield Way("DataLoader, in the loop's process", dataloader, count)


# -- single rows -----------------------------------------------------------------------------------------------


def single_jobs(folder: Path) -> Iterable[Way]:
    values = list(range(SINGLES))

    def ours() -> Delivered:
        import pipegraph as pg
        from pipegraph import operators as ops

        graph = pg.Graph("rows")
        graph.add(ops.FromSequence(values))
        with graph.loader() as loader:
            return SINGLES, float(sum(loader))

    def dataloader() -> Delivered:
        from torch.utils.data import DataLoader

        return SINGLES, float(sum(DataLoader(values, batch_size=None)))  # type: ignore[arg-type]

    yield Way(OURS, ours, SINGLES)
    yield Way("DataLoader, in the loop's process", dataloader, SINGLES)


JOBS: dict[str, Callable[[Path], Iterable[Way]]] = {
    "text": text_jobs,
    "parquet": parquet_jobs,
    "table": table_jobs,
    "tokens": token_jobs,
    "rows": single_jobs,
}


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--jobs", default=",".join(JOBS), help="comma-separated")
    options = parser.parse_args()
    configuration = {"rounds": options.rounds, "documents": DOCUMENTS, "rows": ROWS, "tokens": TOKENS}
    harness.header(CLAIM, configuration)
    results: dict[str, Any] = {}
    for job in options.jobs.split(","):
        with tempfile.TemporaryDirectory() as folder:
            ways = harness.chosen(JOBS[job](Path(folder)), options.only)
            sums = harness.attempt(ways, lambda way: str(way.epoch()))
            for name, said in sums.items():
                print(f"  {job}: {name:<36} {said}", file=sys.stderr)
            good = [way for way in ways if not sums[way.name].startswith(harness.FAILED)]
            assert len({sums[way.name] for way in good}) <= 1, sums
            _ended_s.take()
            result = harness.race(good, options.rounds)
        others = [way.name for way in good if way.name != OURS]
        print(f"\n{job}\n{harness.rate_table(result, others, 'rows')}\n", flush=True)
        results[job] = {**harness.summary(result, others), "checks": sums}
    if not options.no_record:
        print("recorded in", harness.record("ordinary", CLAIM, configuration, results).name)


if __name__ == "__main__":
    main()
