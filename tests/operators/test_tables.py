"""Tables and token arrays as sources."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError

pa = pytest.importorskip("pyarrow")


def table(chunks: int = 3, rows: int = 40) -> Any:
    """Several batches of every kind of column."""
    made = [
        {
            "id": i,
            "x": i / 2,
            "text": f"row {i}",
            "tokens": list(range(i % 4)),
            "fixed": [i, i + 1],
            "data": bytes([i % 256]),
            "nested": {"a": i},
        }
        for i in range(chunks * rows)
    ]
    schema = pa.schema(
        [
            ("id", pa.int32()),
            ("x", pa.float32()),
            ("text", pa.string()),
            ("tokens", pa.list_(pa.uint16())),
            ("fixed", pa.list_(pa.float32(), 2)),
            ("data", pa.binary()),
            ("nested", pa.struct([("a", pa.int64())])),
        ]
    )
    batches = [
        pa.RecordBatch.from_pylist(made[at : at + rows], schema) for at in range(0, chunks * rows, rows)
    ]
    return pa.Table.from_batches(batches)


def batches(source: Any, size: int = 16) -> list[Any]:
    made = pg.Graph("table", seed=3)
    made.add(source).then(ops.Batch(size, pad=0))
    with made.loader() as loader:
        return list(loader)


def test_rows_have_types_that_follow_from_the_columns() -> None:
    first = batches(ops.FromTable(table()))[0]
    assert first["id"].tolist() == list(range(16))
    assert (first["id"].dtype, first["x"].dtype, first["tokens"].dtype) == (
        torch.int64,
        torch.float64,
        torch.uint16,
    )
    assert first["fixed"].dtype == torch.float32
    assert first["fixed"].shape == (16, 2)
    assert first["tokens"].shape == (16, 3)
    assert first["text"][3] == "row 3"
    assert first["data"][3] == b"\3"
    assert first["nested"]["a"].tolist() == list(range(16))


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_row_comes_once_from_any_batch_of_the_table(shuffle: bool) -> None:
    found = [i for batch in batches(ops.FromTable(table(), shuffle=shuffle), 7) for i in batch["id"].tolist()]
    assert sorted(found) == list(range(120))
    assert (found == sorted(found)) is not shuffle


def test_states_and_workers_change_nothing() -> None:
    def graph(workers: int = 2, backend: str = "thread") -> pg.Graph:
        made = pg.Graph("table", seed=3)
        rows = made.add(
            ops.FromTable(table(), columns=["id", "x"], shuffle=True), workers=workers, backend=backend
        )
        rows.then(ops.Batch(16))
        return made

    pg.testing.assert_resumes_exactly(graph)
    reference = [batch["id"].tolist() for batch in graph(1).loader()]
    assert reference == [batch["id"].tolist() for batch in graph(2, "process").loader()]


def test_nulls_are_refused_before_anything_runs_and_those_of_floats_are_nan() -> None:
    given = pa.table({"n": [1, None, 3], "x": [0.5, None, 1.0], "t": ["a", "b", None]})
    with pytest.raises(GraphError, match=r"column 'n' \(int64\) has 1 nulls.*fill_null"):
        ops.FromTable(given)
    with pytest.raises(GraphError, match="has 1 nulls inside its lists"):
        ops.FromTable(pa.table({"l": [[1, None]]}))
    (found,) = batches(ops.FromTable(given, columns=["x"]))
    assert found["x"].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("kind", ["array", "slice", "memmap", "path", "npy"])
def test_windows_of_tokens(tmp_path: Path, kind: str) -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    tokens.tofile(tmp_path / "t.bin")
    np.append(9, tokens).astype(np.uint16).tofile(tmp_path / "more.bin")
    np.save(tmp_path / "t.npy", tokens)
    given: Any = {
        "array": tokens,
        "memmap": np.memmap(tmp_path / "t.bin", np.uint16, mode="r"),
        "slice": np.memmap(tmp_path / "more.bin", np.uint16, mode="r")[1:],
        "path": tmp_path / "t.bin",
        "npy": tmp_path / "t.npy",
    }[kind]
    source = ops.FromTokens(given, window=65, stride=64, dtype="uint16", shuffle=False)
    again = pickle.loads(pickle.dumps(source))
    if kind not in ("array", "slice"):
        assert len(pickle.dumps(source)) < 1000
    for each in (source, again):
        found = torch.cat([batch["tokens"] for batch in batches(each)])
        assert found.shape == (15, 65)
        assert found.dtype == torch.int64
        assert found[2].tolist() == list(range(128, 193))
    sample = source.item(0)["tokens"]
    sample[0] = 7
    assert source.item(0)["tokens"][0] == 0


def test_a_batch_of_long_windows_keeps_no_other_alive() -> None:
    """Several are read in one go."""
    found = batches(ops.FromTokens(np.arange(200_000, dtype=np.uint16), window=500), size=4)
    assert [batch["tokens"][0, 0].item() for batch in found] == [
        at % (1 << 16) for at in range(0, 200_000, 2000)
    ]
    assert {batch["tokens"].untyped_storage().nbytes() for batch in found} == {4 * 500 * 8}


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (np.zeros(5, np.int32), {"window": 6}, "5 tokens hold no window of 6"),
        (np.zeros(5, np.float32), {"window": 2}, "integers is needed, got ndarray float32"),
        (np.zeros(5, np.int32), {"window": 0}, "window must be an int >= 1, got 0"),
        ([1, 2], {"window": 1}, "integers is needed, got list"),
        (np.ma.masked_equal(np.arange(5), 1), {"window": 2}, r"what is masked: give .*\.filled\(0\)"),
        ("tokens.bin", {"window": 1}, "give dtype=, such as 'uint16'"),
    ],
)
def test_what_holds_no_tokens_is_refused(tokens: Any, options: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        ops.FromTokens(tokens, **options)
