"""Tables and token arrays as sources."""

import math
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError, GraphError
from pipegraph.testing import fingerprint

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


@pytest.mark.parametrize("nulls", [False, True])
def test_texts_and_bytes_that_are_views_are_shuffled_as_others_are(nulls: bool) -> None:
    if not hasattr(pa, "string_view"):
        pytest.skip("this pyarrow has no views")
    texts = [f"row {i}" * (i % 5) if i % 3 or not nulls else None for i in range(40)]
    columns = {"text": texts, "data": [text and text.encode() for text in texts]}
    kinds = {"text": pa.string_view(), "data": pa.binary_view()}
    parts = [
        pa.table({n: pa.array(v[at : at + 8], kinds[n]) for n, v in columns.items()}) for at in (0, 8, 16)
    ]
    given = pa.concat_tables(parts)
    if int(pa.__version__.partition(".")[0]) < 18:
        with pytest.raises(
            GraphError, match=r"column 'text' \(string_view\): .* pip install \"pyarrow>=18\""
        ):
            ops.FromTable(given)
        return
    source = ops.FromTable(given, fill={"text": "none", "data": b"none"}, shuffle=True)
    found = [text for batch in batches(source, 7) for text in batch["text"]]
    assert sorted(found) == sorted(text if text is not None else "none" for text in texts[:24])
    assert [source.item(i)["data"] for i in range(24)] == [
        b"none" if text is None else text.encode() for text in texts[:24]
    ]


@pytest.mark.parametrize(
    "values",
    [
        lambda: pa.compute.run_end_encode(pa.array([1, 1, 2])),
        lambda: pa.array([["a"], ["b"], []], pa.list_(pa.string_view())),
        lambda: pa.array([{"a": "b"}] * 3, pa.struct([("a", pa.string_view())])),
    ],
)
def test_a_column_of_which_arrow_picks_no_rows_is_refused_by_name(values: Any) -> None:
    pytest.importorskip("pyarrow.compute")
    given = pa.table({"n": [1, 2, 3], "odd": values()})
    with pytest.raises(
        GraphError, match=r"column 'odd' \(.*\) is of a type of which Arrow cannot pick rows: cast it"
    ):
        ops.FromTable(given, shuffle=True)
    assert len(batches(ops.FromTable(given, columns=["n"], shuffle=True))) == 1


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


def test_lists_lie_in_the_tables_memory() -> None:
    given = table(1)
    column = given.column("tokens").chunk(0)
    start, nbytes = column.values.buffers()[1].address, column.values.buffers()[1].size
    array = ops.FromTable(given).item(3)["tokens"]
    assert start <= array.__array_interface__["data"][0] < start + nbytes
    assert not array.flags.writeable


def test_nulls_are_filled_for_the_whole_table_or_refused_before_anything_runs() -> None:
    given = pa.table({"n": [1, None, 3], "x": [0.5, None, 1.0], "t": ["a", "b", None]})
    with pytest.raises(GraphError, match=r"column 'n' \(int64\) has 1 nulls.*fill=\{'n': \.\.\.\}"):
        ops.FromTable(given)
    (found,) = batches(ops.FromTable(given, fill={"n": -1, "t": ""}))
    assert found["n"].tolist() == [1, -1, 3]
    assert found["x"].isnan().tolist() == [False, True, False]
    assert found["t"] == ["a", "b", ""]


@pytest.mark.parametrize(
    ("values", "fill"),
    [([1, None], "x"), ([1, None], 0.5), ([True, None], 0), ([[1], None], 2.5), (["a", None], 3)],
)
def test_a_filling_of_another_type_than_its_column_is_refused(values: list[Any], fill: Any) -> None:
    with pytest.raises(GraphError, match=r"fill=\{'a': .*\} is no value of type .*, which the column has"):
        ops.FromTable(pa.table({"a": values}), fill={"a": fill})


def test_a_filling_is_read_as_the_columns_values_are() -> None:
    given = pa.table({"x": [None, 1.5], "t": pa.array([None, "b"]).dictionary_encode(), "l": [None, [1]]})
    first, second = batches(ops.FromTable(given, fill={"x": 0, "t": "", "l": []}), size=1)
    assert first["x"].dtype == second["x"].dtype == torch.float64
    assert first["t"] == [""] and first["l"].dtype == second["l"].dtype
    (unknown,) = batches(ops.FromTable(pa.table({"n": pa.nulls(2)}), fill={"n": 7}))
    assert unknown["n"].tolist() == [7, 7]
    with pytest.raises(GraphError, match="fills nothing: a batch has no place for None"):
        ops.FromTable(given, fill={"x": None})


def test_nulls_inside_lists_of_integers_are_filled_by_a_number() -> None:
    given = pa.table({"l": [[1, None], [None], [3]]})
    with pytest.raises(
        GraphError, match=r"has 2 nulls inside its lists, .*: FromTable\(\.\.\., fill=\{'l': -1\}\)"
    ):
        ops.FromTable(given)
    with pytest.raises(GraphError, match="has 2 nulls inside its lists"):
        ops.FromTable(given, fill={"l": []})
    found = [ops.FromTable(given, fill={"l": -1}).item(row)["l"] for row in range(3)]
    assert [each.tolist() for each in found] == [[1, -1], [-1], [3]]
    assert {each.dtype for each in found} == {np.dtype(np.int64)}
    with pytest.raises(GraphError, match=r"has 1 nulls, which a batch .* fill=\{'l': \(2, \[\]\)\}"):
        ops.FromTable(pa.table({"l": [[1], None]}), fill={"l": 2})


def test_lists_of_bools_are_arrays_whose_nulls_need_a_filling() -> None:
    given = pa.table({"l": [[True, None], None, [False]]})
    with pytest.raises(GraphError, match=r"has 1 nulls inside its lists.*fill=\{'l': \(False, \[\]\)\}"):
        ops.FromTable(given)
    with pytest.raises(GraphError, match="is no value of type bool"):
        ops.FromTable(given, fill={"l": (0, [])})
    source = ops.FromTable(given, fill={"l": (False, [])})
    found = [source.item(row)["l"] for row in range(3)]
    assert [each.tolist() for each in found] == [[True, False], [], [False]]
    assert {each.dtype for each in found} == {np.dtype(bool)}
    (batch,) = batches(source)
    assert batch["l"].dtype == torch.bool


FILLS: dict[str, Any] = {"n": -1, "t": "", "l": 0, "d": 1}


@pytest.mark.parametrize("whole", [False, True])
def test_nulls_are_read_alike_from_a_table_and_from_a_shard_of_it(whole: bool, tmp_path: Any) -> None:
    columns = {
        "n": [1, None, 3],
        "x": pa.array([0.5, None, 1.0], pa.float32()),
        "d": pa.array([None, 7, 7]).dictionary_encode(),
        "t": ["a", None, "c"],
        "l": pa.array([[1, None], [2], [3]], pa.list_(pa.int16())),
        "f": [[0.5], [None], []],
    }
    given = pa.table(columns)
    pytest.importorskip("pyarrow.parquet").write_table(given, tmp_path / "a.parquet")
    graph = pg.Graph("g")
    order = pg.order.PartOrder(shuffle=False) if whole else pg.order.LaneOrder(shuffle=False)
    graph.add(ops.ShardSelect(tmp_path, order=order)).then(ops.Load(fill=FILLS))
    with graph.loader() as loader:
        rows = [{**row, "key": 0} for row in loader]
    table_rows = [{**ops.FromTable(given, fill=FILLS).item(row), "key": 0} for row in range(3)]
    assert list(map(fingerprint, rows)) == list(map(fingerprint, table_rows))
    assert rows[1]["n"] == -1 and rows[1]["t"] == "" and rows[0]["d"] == 1 and math.isnan(rows[1]["x"])
    assert rows[0]["l"].tolist() == [1, 0] and rows[0]["l"].dtype == np.int16


def test_columns_are_checked() -> None:
    with pytest.raises(GraphError, match="there is no column 'labels'; there are 'id', 'x'"):
        ops.FromTable(table(), columns=["labels"])
    with pytest.raises(GraphError, match=r"must be a list of names, got 'x': write columns=\['x'\]"):
        ops.FromTable(table(), columns="x")
    for none in ([], 3):
        with pytest.raises(GraphError, match="must be a list of at least one name"):
            ops.FromTable(table(), columns=none)  # type: ignore[arg-type]
        with pytest.raises(GraphError, match="must be a list of at least one name"):
            ops.Load(columns=none)  # type: ignore[arg-type]
    assert ops.FromTable(table(), columns=(name for name in ["x"])).table.column_names == ["x"]  # type: ignore[arg-type]
    assert ops.Load(columns={"b", "c", "a"}).choice.columns == ("a", "b", "c")  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="a table of pyarrow, pandas or polars.*got list; use FromSequence"):
        ops.FromTable([1, 2])


def test_columns_of_one_name_are_refused() -> None:
    pandas = pytest.importorskip("pandas", reason="the extra test brings it")
    twice = pa.table([[1], [2], [3]], names=["a", "b", "a"])
    for given in (twice, pandas.DataFrame([[1, 2, 3]], columns=["a", "b", "a"])):
        with pytest.raises(
            GraphError, match="several columns named 'a'; .* rename them, as with table.rename_c"
        ):
            ops.FromTable(given)
    with pytest.raises(GraphError, match="several columns named 'a'"):
        ops.FromTable(twice, columns=["a"])
    assert ops.FromTable(twice, columns=["b"]).item(0) == {"b": 2}


def test_data_frames_are_tables() -> None:
    pandas = pytest.importorskip("pandas", reason="the extra test brings it")
    with pytest.raises(GraphError, match=r"FromTable: .*column odd .*; give its values one type"):
        ops.FromTable(pandas.DataFrame({"odd": [{"a": 1}, [1]]}))
    for odd in (pandas.Series([1 << 70]), pandas.arrays.SparseArray([0, 1])):
        with pytest.raises(GraphError, match=r"FromTable: .*; give its values one type"):
            ops.FromTable(pandas.DataFrame({"odd": odd}))
    frame = pandas.DataFrame({"n": [1, 2, 3], "name": ["a", "b", "c"]}, index=[7, 8, 9])
    (found,) = batches(ops.FromTable(frame))
    assert found["n"].tolist() == [1, 2, 3]
    assert found["name"] == ["a", "b", "c"]


@pytest.mark.parametrize("kind", ["array", "memmap", "path", "npy"])
def test_windows_of_tokens(tmp_path: Path, kind: str) -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    tokens.tofile(tmp_path / "t.bin")
    np.save(tmp_path / "t.npy", tokens)
    given: Any = {
        "array": tokens,
        "memmap": np.memmap(tmp_path / "t.bin", np.uint16, mode="r"),
        "path": tmp_path / "t.bin",
        "npy": tmp_path / "t.npy",
    }[kind]
    source = ops.FromTokens(given, window=65, stride=64, dtype="uint16", shuffle=False)
    again = pickle.loads(pickle.dumps(source))
    if kind != "array":
        assert len(pickle.dumps(source)) < 1000
    for each in (source, again):
        found = torch.cat([batch["tokens"] for batch in batches(each)])
        assert found.shape == (15, 65)
        assert found.dtype == torch.int64
        assert found[2].tolist() == list(range(128, 193))
    sample = source.item(0)["tokens"]
    sample[0] = 7
    assert source.item(0)["tokens"][0] == 0


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (np.zeros(5, np.int32), {"window": 6}, "5 tokens hold no window of 6"),
        (np.zeros(5, np.float32), {"window": 2}, "integers is needed, got one of float32 and shape"),
        (np.zeros(5, np.int32), {"window": 0}, "window must be an int >= 1, got 0"),
        ([1, 2], {"window": 1}, "integers is needed, got list"),
        (np.ma.masked_equal(np.arange(5), 1), {"window": 2}, r"what is masked: give .*\.filled\(0\)"),
        ("tokens.bin", {"window": 1}, "give dtype=, such as 'uint16'"),
    ],
)
def test_what_holds_no_tokens_is_refused(tokens: Any, options: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        ops.FromTokens(tokens, **options)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("size", [5, 16])
def test_windows_gathered_for_a_batch_are_those_read_one_by_one(workers, size, monkeypatch):
    tokens = np.arange(20_011, dtype=np.uint16)
    gathered = []
    gather = ops.FromTokens.columns

    def batches(alone: bool) -> list[Any]:
        def counted(self: Any, indices: Any) -> Any:
            if alone:
                raise RuntimeError("one by one")
            gathered.append(len(indices))
            return gather(self, indices)

        monkeypatch.setattr(ops.FromTokens, "columns", counted)
        graph = pg.Graph("tokens", seed=3)
        source = graph.add(ops.FromTokens(tokens, 33, stride=32, shuffle=True), workers=workers)
        source.then(ops.Batch(size))
        with graph.loader(epochs=2) as loader:
            return [chunk for _ in range(2) for chunk in loader.chunks()]

    together, alone = batches(False), batches(True)
    assert max(gathered) > 1
    assert [chunk.keys for chunk in together] == [chunk.keys for chunk in alone]
    assert [chunk.lineages for chunk in together] == [chunk.lineages for chunk in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.data["tokens"].dtype == other.data["tokens"].dtype == torch.int64
        assert torch.equal(one.data["tokens"], other.data["tokens"])
        assert one.data["tokens"].untyped_storage().nbytes() == one.data["tokens"].nbytes


@pytest.mark.parametrize("kind", ["tokens", "arrays", "tensors"])
def test_each_batch_of_several_that_come_together_has_its_memory_for_itself(kind: str) -> None:
    tokens = np.arange(64 * 16, dtype=np.uint16)
    windows = [{"tokens": window} for window in tokens.reshape(-1, 4)]
    if kind == "tensors":
        windows = [{"tokens": torch.from_numpy(window["tokens"])} for window in windows]
    made = ops.FromTokens(tokens, 4) if kind == "tokens" else ops.FromSequence(windows)
    graph = pg.Graph("windows")
    source = graph.add(made, workers=2, capacity=64)
    source.then(ops.Batch(16), capacity=4)
    assert graph.plan().stages[source.name].bundle_rows == 32
    with graph.loader() as loader:
        batches = [batch["tokens"] for batch in loader]
    assert torch.cat(batches).tolist() == np.arange(64 * 16).reshape(-1, 4).tolist()
    assert {batch.untyped_storage().nbytes() for batch in batches} == {
        16 * 4 * (8 if kind == "tokens" else 2)
    }
    assert len({batch.untyped_storage().data_ptr() for batch in batches}) == 16


def test_a_batch_that_fails_takes_none_along_that_came_together_with_it() -> None:
    def collate(items: Any) -> Any:
        if items[0]["tokens"][0] == 64:
            raise ValueError("the second batch")
        return [int(item["tokens"][0]) for item in items]

    graph = pg.Graph("windows")
    source = graph.add(ops.FromTokens(np.arange(64 * 4, dtype=np.uint16), 4), workers=1, capacity=64)
    source.then(ops.Batch(16, collate=collate))
    with graph.loader() as loader:
        batches = iter(loader)
        assert next(batches)[0] == 0
        with pytest.raises(ValueError, match="the second batch"):
            next(batches)


LISTS = {
    "lists": pa.array([[1, None], None, [], [4]], pa.list_(pa.int64())),
    "fixed": pa.array([[1, None], None, [3, 4], [5, 6]], pa.list_(pa.int32(), 2)),
    "floats": pa.array([[1.0, None], None, [], [4.0]], pa.list_(pa.float32())),
}


def read_table(made: Any, fill: Any, folder: Path) -> list[Any]:
    graph = pg.Graph("table")
    graph.add(ops.FromTable(made, fill=fill))
    with graph.loader() as loader:
        return [row["x"] for row in loader]


def read_shard(made: Any, fill: Any, folder: Path) -> list[Any]:
    try:
        pytest.importorskip("pyarrow.parquet").write_table(made, folder / "a.parquet")
    except pa.ArrowNotImplementedError as error:
        pytest.skip(f"this pyarrow cannot write it: {error}")
    graph = pg.Graph("shard")
    graph.add(ops.ShardSelect([folder / "a.parquet"], pg.order.LaneOrder(shuffle=False))).then(
        ops.Load(fill=fill)
    )
    with graph.loader() as loader:
        return [row["x"] for row in loader]


@pytest.mark.parametrize("read", [read_table, read_shard])
@pytest.mark.parametrize(
    ("kind", "fill", "expected"),
    [
        ("lists", (-1, [7]), [[1, -1], [7], [], [4]]),
        ("fixed", (-1, [0, 0]), [[1, -1], [0, 0], [3, 4], [5, 6]]),
        ("floats", (-1, [7]), [[1, -1], [7], [], [4]]),
    ],
)
def test_missing_lists_and_nulls_inside_lists_are_filled_in_one_go(
    read: Any, kind: str, fill: Any, expected: Any, tmp_path: Path
) -> None:
    made = pa.table({"x": LISTS[kind]})
    if read is read_shard and kind == "fixed" and int(pa.__version__.partition(".")[0]) < 26:
        with pytest.raises(DataError, match='cannot read: pip install "pyarrow>=26"'):
            read(made, {"x": fill}, tmp_path)
        return
    found = read(made, {"x": fill}, tmp_path)
    assert [row.tolist() for row in found] == expected
    assert {str(row.dtype) for row in found} == {
        {"float": "float32"}.get(name := str(LISTS[kind].type.value_type), name)
    }
    with pytest.raises(GraphError, match=r"fill={'x': '\?'} is no value of type"):
        read(made, {"x": (-1, "?")}, tmp_path)


def test_a_table_with_both_kinds_of_nulls_names_both_fillings() -> None:
    made = pa.table({"x": LISTS["lists"]})
    for fill in (None, {"x": []}):
        with pytest.raises(GraphError, match=r"1 nulls inside its lists.*fill={'x': \(-1, \[\]\)}"):
            ops.FromTable(made, fill=fill)
    with pytest.raises(GraphError, match=r"1 nulls, which.*fill={'x': \(5, \[\]\)}"):
        ops.FromTable(made, fill={"x": 5})


@pytest.mark.parametrize(
    ("column", "fill"),
    [
        (pa.array([["a"], None]), "ab"),
        (pa.array([{"x": 1}, None]), []),
    ],
)
def test_a_filling_of_another_kind_is_refused(column: Any, fill: Any) -> None:
    with pytest.raises(GraphError, match=r"fill={'x': .*} is no value of type"):
        ops.FromTable(pa.table({"x": column}), fill={"x": fill})


def test_a_cache_that_is_a_folders_name_is_refused_with_the_class_to_use() -> None:
    with pytest.raises(
        GraphError, match=r"Load: cache must be a pg\.NodeCache\(folder, limit\), got 'cache'"
    ):
        ops.Load(cache="cache")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["npy", "raw", "part"])
def test_a_file_of_tokens_that_was_cut_short_is_an_error_and_no_crash(kind, tmp_path):
    path = tmp_path / ("tokens.npy" if kind == "npy" else "tokens")
    tokens = np.arange(20_000, dtype=np.int64)
    np.save(path, tokens) if kind == "npy" else tokens.tofile(path)
    given = np.memmap(path, np.int64, mode="r", offset=8000)[10_000:] if kind == "part" else path
    source = ops.FromTokens(given, 1000, dtype="int64")
    again = pickle.loads(pickle.dumps(source))
    assert source.item(8)["tokens"].tolist() == again.item(8)["tokens"].tolist()
    os.truncate(path, 1000)
    for each in (source,) if kind == "part" else (source, again):  # a part crosses as a copy
        for read, args in ((each.item, (8,)), (each.read_into, ([], [8], 0)), (each.columns, ([8],))):
            with pytest.raises(DataError, match=r"FromTokens: '.*tokens.*' was cut short: .* has 1000\."):
                read(*args)


def test_a_series_is_read_by_position_where_its_labels_are_positions():
    pandas = pytest.importorskip("pandas", reason="the extra test brings it")
    source = ops.FromSequence(pandas.Series([5, 6, 7]))
    assert [source.read(index, 0) for index in range(3)] == [5, 6, 7]
    for given in (pandas.Index([5, 6, 7]), pandas.array([5, 6, 7]), pandas.Categorical([5, 6, 7])):
        assert [ops.FromSequence(given).read(index, 0) for index in range(3)] == [5, 6, 7]


def test_tokens_that_were_changed_in_a_map_that_is_not_written_back_cross_as_they_are(tmp_path):
    np.arange(100, dtype=np.int64).tofile(path := tmp_path / "tokens")
    tokens = np.memmap(path, np.int64, mode="c")
    tokens[:10] = 7
    again = pickle.loads(pickle.dumps(ops.FromTokens(tokens, 10)))
    assert again.item(0)["tokens"].tolist() == [7] * 10


@pytest.mark.parametrize(("name", "content"), [("a", b""), ("a", b"abc"), ("a.npy", b""), ("a.npy", b"abc")])
def test_a_file_that_holds_no_tokens_is_named(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(GraphError, match=rf"FromTokens: '.*{name}' holds no array of tokens"):
        ops.FromTokens(tmp_path / name, 3, dtype="int32")


def test_a_writable_map_of_tokens_that_was_cut_between_epochs_is_an_error_and_no_crash(programs, tmp_path):
    path = tmp_path / "tokens"
    np.arange(1 << 16, dtype=np.int32).tofile(path)
    done = programs.run(
        """
import os, sys
import numpy as np
import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError

graph = pg.Graph("g")
graph.add(ops.FromTokens(np.memmap(sys.argv[1], np.int32), 128))  # "r+" by default
with graph.loader(epochs=2) as loader:
    list(loader)
    os.truncate(sys.argv[1], 4096)
    try:
        list(loader)
    except DataError as error:
        print("was cut short" in str(error))
""",
        path,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.npy"])
def test_a_dtype_that_numpy_does_not_know_is_refused(tmp_path, name):
    with pytest.raises(
        GraphError, match="FromTokens: dtype must be one of NumPy's, such as 'uint16', got 'uint16x'"
    ):
        ops.FromTokens(tmp_path / name, 3, dtype="uint16x")


def read_rows(source: Any) -> list[Any]:
    graph = pg.Graph("rows")
    graph.add(source)
    with graph.loader() as loader:
        return list(loader)


@pytest.mark.parametrize("plain", [pa.string(), pa.int64(), pa.list_(pa.int64())], ids=str)
def test_nulls_among_the_values_of_a_dictionary_are_nulls_of_its_column(plain: Any) -> None:
    value, instead = {"string": ("x", "?"), "int64": (5, -1)}.get(str(plain), ([1, 2], [3]))
    values = pa.array([value, None, value], plain)
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, None, 2], pa.int8()), values)
    table = pa.table({"a": pa.chunked_array([column.slice(0, 3), column.slice(3)])})
    with pytest.raises(GraphError, match="column 'a' .* has 2 nulls, which a batch has no place for"):
        ops.FromTable(table)
    found = [row["a"] for row in read_rows(ops.FromTable(table, fill={"a": instead}))]
    assert [np.asarray(each).tolist() for each in found] == [value, instead, value, instead, value]
    assert ops.FromTable(table.slice(4)).layout() == 1  # of the rows that are there


def test_nulls_among_the_floats_of_a_dictionary_are_nan() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), pa.array([5.0, None]))
    first, *others = (row["a"] for row in read_rows(ops.FromTable(pa.table({"a": column}))))
    assert first == 5.0 and all(map(math.isnan, others)) and len(others) == 2
