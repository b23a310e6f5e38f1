"""Hugging Face's ``datasets``: map-style, streaming, and packed.

The streaming dataset of huggingface/transformers issue 40245: training resumed in the middle used to read everything
before it again, which took hours.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError

datasets = pytest.importorskip("datasets", reason="make test-interop brings it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight Parquet files of 5,000 documents."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root: Path = tmp_path_factory.mktemp("texts")
    for number in range(8):
        ids = np.arange(5000 * number, 5000 * (number + 1))
        table = pa.table({"id": ids, "text": [f"document {i} " * 20 for i in ids]})
        pq.write_table(table, root / f"{number}.parquet", row_group_size=1000)
    return root


def streaming(folder: Path, kind: str = "mapped") -> Any:
    files = sorted(map(str, folder.glob("*.parquet")))
    found = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    match kind:
        case "mapped":
            return found.map(lambda row: {"words": len(row["text"].split())})
        case "batched":
            return found.map(
                lambda rows: {"words": [len(t.split()) for t in rows["text"]]}, batched=True, batch_size=300
            )
        case "filtered":
            return found.filter(lambda row: row["id"] % 3 == 0)
        case "shuffled":
            return found.shuffle(seed=1, buffer_size=500)
        case "arrow":
            return found.with_format("arrow").map(lambda table: table, batched=True, batch_size=300)
    return found


def graph(items: Any) -> pg.Graph:
    made = pg.Graph("texts")
    chosen = ops.Map(lambda row: row["id"] if isinstance(row, dict) else row.column("id")[0].as_py())
    made.add(ops.FromIterable(items, shard=False), name="texts").then(chosen).then(ops.Batch(32))
    return made


@pytest.mark.parametrize("kind", ["plain", "mapped", "batched", "filtered", "shuffled", "arrow"])
def test_a_stream_resumes_exactly(folder: Path, kind: str) -> None:
    found: list[list[int]] = []
    states = {}
    with graph(streaming(folder, kind).take(4000)).loader() as loader:
        for number, batch in enumerate(loader):
            found.append(batch.tolist())
            if number in (3, 17, 40):
                states[number] = json.loads(json.dumps(loader.state_dict()))
    for number, state in states.items():
        with graph(streaming(folder, kind).take(4000)).loader() as loader:
            loader.load_state_dict(state)
            assert found[number + 1 :] == [batch.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataloader_resumes_a_stream_in_less_than_a_second_also_in_a_later_epoch(
    folder: Path, workers: int
) -> None:
    def make() -> pg.DataLoader:
        return pg.DataLoader(streaming(folder).select_columns(["id"]), 32, num_workers=workers)

    loader = make()
    loader.set_epoch(2)
    found = []
    for batch in loader:
        found.append(batch["id"].tolist())
        if len(found) == 600:
            state = json.loads(json.dumps(loader.state_dict()))
        if len(found) == 603:
            break
    again = make()
    next(iter(again))  # the workers' start is not the stream's
    again.load_state_dict(state)
    passing = iter(again)
    start = time.perf_counter()
    first = next(passing)["id"].tolist()
    assert time.perf_counter() - start < 1
    assert first == found[600]


def test_map_style_data_sets_are_read_in_groups_and_as_tables(folder: Path) -> None:
    found = datasets.load_dataset(
        "parquet", data_files=sorted(map(str, folder.glob("*.parquet"))), split="train"
    )
    for source in (ops.FromSequence(found), ops.FromTable(found)):
        made = pg.Graph("rows")
        made.add(source).then(ops.Batch(64))
        with made.loader() as loader:
            batch = next(iter(loader))
        assert batch["id"].tolist() == list(range(64))
        assert batch["text"][3] == "document 3 " * 20
    chosen = ops.FromTable(found.select(range(100, 200)).shuffle(seed=1))
    made = pg.Graph("rows")
    made.add(chosen).then(ops.Batch(100))
    with made.loader() as loader:
        assert sorted(next(iter(loader))["id"].tolist()) == list(range(100, 200))
    assert ops.FromTable(found.with_format("torch", columns=["id"])).table.column_names == ["id"]
    with pytest.raises(GraphError, match="FromSequence"):
        ops.FromTable(found.with_transform(lambda rows: rows))
