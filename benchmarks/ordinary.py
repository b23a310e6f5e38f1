"""Ordinary jobs, written as the documentation tells a newcomer to, against what the newcomer would use instead.

Claim: ahead of what a user would pick instead, in rate and in CPU time, on text from shards, Parquet, tables, tokens,
photographs in tar shards, single rows, short epochs, functions of torch in threads, and behind a pause. Every
contestant delivers the whole job, from building its loader to the last item; the sums of what it delivered are compared
where all deliver the same.

    python benchmarks/ordinary.py --images FOLDER --rounds 5
    python benchmarks/ordinary.py --jobs parquet,table

A peer that is not installed is named as missing; Hugging Face's ``datasets`` is not in requirements.txt: install it for
the row of Parquet.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import harness
import image_recipe
import numpy as np
import recipe
from harness import Way
from images import WORKERS, one_thread_each, photographs, write_shards
from peers import Samples, start_worker

CLAIM = "ordinary jobs: ahead of what a user would pick instead, in rate and in CPU"
OURS = "pipegraph"
IN_LOOP = "DataLoader, in the loop's process"
GROUPS = "pyarrow, a row group at a time"
TAKE = "pyarrow, table.take for each batch"

DOCUMENTS, SHARDS = 20_000, 8
ROWS, COLUMNS, BATCH = 1_000_000, 5, 256
TOKENS, WINDOW = 20_000_000, 1025
SINGLES = 1_000_000
PHOTOGRAPHS = 2_048
EPOCHS, BATCHES_EACH = 10, 8

Ways = dict[str, Callable[[], Any]]
"""What delivers a job, and gives its rows and a sum of what they hold."""


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
    paths = [folder / f"part-{shard:05}.jsonl" for shard in range(SHARDS)]
    for path in paths:
        with path.open("w") as file:
            for number in range(DOCUMENTS // SHARDS):
                text = " ".join(words[at] for at in rng.integers(0, len(words), 165))
                file.write(json.dumps({"id": number, "text": text}) + "\n")
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


def text_job(folder: Path, images: str | None) -> tuple[int, Ways]:
    paths = write_documents(folder)

    def ours() -> Any:
        import pipegraph as pg
        from pipegraph import operators as ops

        samples = pg.Graph("text").add(ops.ShardSelect(str(folder / "part-*.jsonl"))).then(ops.Load())
        batches = samples.then(tokenized, workers=2, backend="process").then(ops.Batch(64))
        with harness.loaded(batches, "tokens") as found:
            return added(found)

    def dataloader() -> Any:
        return added(torchs(Lines(paths), batch_size=64, shuffle=True, num_workers=2))

    return DOCUMENTS, {OURS: ours, "DataLoader, 2 processes": dataloader}


def torchs(data: Any, **options: Any) -> Any:
    """torch's own loader."""
    from torch.utils.data import DataLoader

    return DataLoader(data, **options)


def added(batches: Iterable[Any]) -> tuple[int, float]:
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
    paths = [folder / f"part-{shard:05}.parquet" for shard in range(SHARDS)]
    for path in paths:
        columns = {f"x{at}": rng.random(ROWS // SHARDS) for at in range(COLUMNS - 1)}
        columns["label"] = rng.integers(0, 10, ROWS // SHARDS)
        pq.write_table(pa.table(columns), path, row_group_size=25_000)
    return paths


def summed(batches: Iterable[dict[str, Any]]) -> tuple[int, float]:
    """Rows, and the sum of two of the columns."""
    rows, total = 0, 0.0
    for batch in batches:
        rows += len(batch["label"])
        total += float(batch["label"].sum()) + float(batch["x0"].sum())
    return rows, round(total, 2)


def by_take(folder: Path) -> Iterator[dict[str, Any]]:
    """The loop that people write: all of it in memory, each batch taken from all over the table."""
    import pyarrow.parquet as pq
    import torch

    table = pq.read_table(sorted(folder.glob("part-*.parquet")))
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


def parquet_job(folder: Path, images: str | None) -> tuple[int, Ways]:
    paths = write_table(folder)

    def ours() -> Any:
        import pipegraph as pg
        from pipegraph import operators as ops

        rows = pg.Graph("parquet").add(ops.ShardSelect(str(folder / "part-*.parquet"))).then(ops.Load())
        with harness.loaded(rows.then(ops.Batch(BATCH))) as batches:
            return summed(batches)

    def hugging_face() -> Any:
        from datasets import load_dataset

        data = load_dataset(
            "parquet", data_files=list(map(str, paths)), split="train", cache_dir=str(folder / "hf")
        )
        return summed(torchs(data.with_format("torch"), batch_size=BATCH, shuffle=True, num_workers=2))

    def take() -> Any:
        return summed(by_take(folder))

    def groups() -> Any:
        return summed(by_groups(paths))

    return ROWS, {OURS: ours, TAKE: take, GROUPS: groups, "Hugging Face, 2 processes": hugging_face}


def table_job(folder: Path, images: str | None) -> tuple[int, Ways]:
    import pyarrow.parquet as pq

    paths = write_table(folder)
    table = pq.read_table(sorted(folder.glob("part-*.parquet")))

    def ours() -> Any:
        import pipegraph as pg
        from pipegraph import operators as ops

        rows = pg.Graph("table").add(ops.FromTable(table, shuffle=True))
        with harness.loaded(rows.then(ops.Batch(BATCH))) as batches:
            return summed(batches)

    return ROWS, {OURS: ours, TAKE: lambda: summed(by_take(folder)), GROUPS: lambda: summed(by_groups(paths))}


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


def token_job(folder: Path, images: str | None) -> tuple[int, Ways]:
    path = folder / "tokens.bin"
    np.random.default_rng(0).integers(0, 50_000, TOKENS, np.uint16).tofile(path)

    def ours() -> Any:
        import pipegraph as pg
        from pipegraph import operators as ops

        tokens = np.memmap(path, np.uint16, mode="r")
        windows = pg.Graph("tokens").add(ops.FromTokens(tokens, window=WINDOW, shuffle=True))
        with harness.loaded(windows.then(ops.Batch(32)), "tokens") as batches:
            return added(batch.long() for batch in batches)

    def dataloader() -> Any:
        return added(torchs(Windows(path), batch_size=32, shuffle=True))

    return TOKENS // WINDOW, {OURS: ours, IN_LOOP: dataloader}


# -- photographs in tar shards ---------------------------------------------------------------------------------


def tar_job(folder: Path, images: str | None) -> tuple[int, Ways]:
    """224 x 224, cropped and flipped at random, two workers: only the numbers of images can be compared."""
    paths = photographs(images)
    paths = (paths * (PHOTOGRAPHS // len(paths) + 1))[:PHOTOGRAPHS]
    shards = write_shards(paths, folder, SHARDS)

    def ours() -> Any:
        import pipegraph as pg
        from pipegraph import operators as ops

        samples = pg.Graph("tars").add(ops.ShardSelect(str(folder / "*.tar"))).then(ops.Load())
        decode = ops.DecodeImage(224, crop=ops.RandomResizedCrop(), flip=0.5)
        with harness.loaded(samples.then(ops.Batch(64)).then(decode, workers=WORKERS)) as batches:
            return sum(len(batch["image"]) for batch in batches)

    def webdataset() -> Any:
        import webdataset as wds

        data = wds.WebDataset(shards, shardshuffle=len(shards)).shuffle(256).map(image_recipe.crop_sample)
        batches = data.batched(64, collation_fn=np.stack)
        loader = wds.WebLoader(batches, batch_size=None, num_workers=WORKERS, worker_init_fn=start_worker)
        return sum(len(batch) for batch in loader)

    def dataloader() -> Any:
        data, order = Samples(paths, recipe.opencv_crop_path), np.random.permutation(PHOTOGRAPHS).tolist()
        options = {"batch_size": 64, "num_workers": WORKERS, "worker_init_fn": start_worker}
        return sum(len(batch) for batch in torchs(data, sampler=order, **options))

    return PHOTOGRAPHS, {
        OURS: ours,
        "WebDataset, 2 processes": webdataset,
        "DataLoader over files": dataloader,
    }


# -- single rows, and short epochs -----------------------------------------------------------------------------


def single_job(folder: Path, images: str | None) -> tuple[int, Ways]:
    values = list(range(SINGLES))

    def ours() -> Any:
        import pipegraph as pg
        from pipegraph import operators as ops

        with harness.loaded(pg.Graph("rows").add(ops.FromSequence(values))) as rows:
            return sum(rows)

    return SINGLES, {OURS: ours, IN_LOOP: lambda: sum(torchs(values, batch_size=None))}


def epochs_job(folder: Path, images: str | None) -> tuple[int, Ways]:
    """Ten epochs of eight batches, two fresh worker processes for each."""
    data = list(range(BATCHES_EACH * 64))

    def deliver(loader: Any) -> int:
        return sum(int(batch.sum()) for _ in range(EPOCHS) for batch in loader)

    def ours() -> Any:
        import pipegraph as pg

        return deliver(pg.DataLoader(data, batch_size=64, shuffle=True, num_workers=2))  # type: ignore[arg-type]

    def dataloader() -> Any:
        return deliver(torchs(data, batch_size=64, shuffle=True, num_workers=2))

    return EPOCHS * len(data), {"pipegraph, DataLoader": ours, "DataLoader": dataloader}


# -- torch in threads, a pause before each batch, an operator's own state ---------------------------------------


def in_torch(batch: Any) -> Any:
    """So many elements that torch would start threads of its own."""
    for _ in range(20):
        batch = (batch.sin() + batch.square()).tanh()
    return batch


def stacked_in_torch(rows: list[Any]) -> Any:
    import torch

    return in_torch(torch.from_numpy(np.stack(rows)))


def torch_job(folder: Path, images: str | None) -> tuple[int, Ways]:
    data = np.random.default_rng(0).random((8_192, 1_024), np.float32)

    def ours() -> Any:
        import pipegraph as pg
        from pipegraph import operators as ops

        batches = pg.Graph("torch").add(ops.FromSequence(data)).then(ops.Batch(64))
        with harness.loaded(batches.then(in_torch, workers=2)) as found:
            return sum(map(len, found))

    def dataloader() -> Any:
        return sum(map(len, torchs(data, batch_size=64, num_workers=2, collate_fn=stacked_in_torch)))

    return len(data), {OURS: ours, "DataLoader, 2 processes": dataloader}


class Paused(Way):
    """What ``next`` takes behind a step of 16 ms, in which the loop's thread sleeps; ``epoch()`` gives the batches."""

    def total(self) -> int:
        with contextlib.closing(self.epoch()) as batches:
            return sum(int(batch.sum()) for batch in islice(batches, self.rows))

    def measure(self) -> harness.Measures:
        with contextlib.closing(self.epoch()) as batches:
            next(batches)  # starts the loader
            spent_s, used_s = 0.0, time.process_time()
            for _ in range(self.rows):
                time.sleep(0.016)
                start = time.perf_counter()
                next(batches)
                spent_s += time.perf_counter() - start
            return harness.run(spent_s, time.process_time() - used_s, self.rows)


def said(way: Way) -> str:
    return str(way.total() if isinstance(way, Paused) else way.epoch())


def pause_job(folder: Path, images: str | None) -> tuple[int, Ways]:
    data = range(1_000_000)

    def ours() -> Iterator[Any]:
        import pipegraph as pg
        from pipegraph import operators as ops

        with harness.loaded(pg.Graph("pause").add(ops.FromSequence(data)).then(ops.Batch(64))) as batches:
            yield from batches

    def dataloader() -> Iterator[Any]:
        yield from torchs(data, batch_size=64, num_workers=1)

    return 200, {OURS: ours, "DataLoader, 1 process": dataloader}


def state_job(folder: Path, images: str | None) -> tuple[int, Ways]:
    """An operator whose state has a key of each item that came: the cost of an item must not grow with them."""
    import pipegraph as pg
    from pipegraph import operators as ops

    class Seen(pg.Operator):
        def open(self, context: Any) -> None:
            self.seen: dict[str, int] = {}

        def process(self, chunk: Any) -> Any:
            self.seen[f"key {chunk.data}"] = chunk.data
            return chunk

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: Any) -> None:
            self.seen = dict(state["seen"])

    def times(epochs: int) -> Any:
        with harness.loaded(
            pg.Graph("state").add(ops.FromSequence(range(80_000 // epochs))).then(Seen())
        ) as rows:
            return sum(len(list(rows)) for _ in range(epochs))

    return 80_000, {"80,000 keys": lambda: times(1), "20,000 keys, four times": lambda: times(4)}


JOBS: dict[str, Callable[[Path, str | None], tuple[int, Ways]]] = {
    "text": text_job,
    "parquet": parquet_job,
    "table": table_job,
    "tokens": token_job,
    "tars": tar_job,
    "rows": single_job,
    "epochs": epochs_job,
    "torch": torch_job,
    "pause": pause_job,
    "state": state_job,
}


def main() -> None:
    parser = harness.arguments(__doc__, images=True)
    parser.add_argument("--jobs", default=",".join(JOBS), help="comma-separated")
    options = parser.parse_args()
    one_thread_each()
    configuration = {"documents": DOCUMENTS, "rows": ROWS, "tokens": TOKENS, "rounds": options.rounds}
    harness.header(CLAIM, configuration)
    results: dict[str, Any] = {}
    for job in options.jobs.split(","):
        if job == "tars" and not options.images:
            print("left out: tars: no photographs (--images FOLDER or PIPEGRAPH_TEST_IMAGES)")
            continue
        with tempfile.TemporaryDirectory() as folder:
            print(f"\n{job}")
            try:
                rows, ways = JOBS[job](Path(folder), options.images)
            except ImportError as error:
                print("not measured:", error)
                results[job] = {"missing": {"every way": str(error)}}
                continue
            kind = Paused if job == "pause" else Way
            entered = [kind(name, epoch, rows) for name, epoch in ways.items()]
            results[job] = harness.contest(entered, said, list(ways)[1:], options)
        sums = {said for said in results[job]["checks"].values() if not said.startswith(harness.FAILED)}
        assert len(sums) <= 1, f"{job}: the contestants delivered different rows: {sums}"
    harness.keep("ordinary", CLAIM, configuration, results, options)


if __name__ == "__main__":
    main()
