"""LitData's chunks, written here byte by byte as its writer lays them out."""

import io
import json
import pickle
import struct
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError, ShardError
from pipegraph.storage.formats import LitDataFormat, format_of, litdata
from pipegraph.storage.formats.litdata import layout_of
from pipegraph.storage.shard_files import BytesFile, LocalFile, ShardFile
from tests.storage.reading_shards import read_damaged

LEAF = {"type": None, "context": None, "children_spec": []}


def tree(kind: str, context: Any, *children: Any) -> dict[str, Any]:
    return {"type": f"builtins.{kind}", "context": json.dumps(context), "children_spec": list(children)}


def chunk(rows: Sequence[Sequence[bytes]], sized: bool = True) -> bytes:
    made = [(struct.pack(f"<{len(row)}I", *map(len, row)) if sized else b"") + b"".join(row) for row in rows]
    offsets = [4 + 4 * (len(rows) + 1)]
    for sample in made:
        offsets.append(offsets[-1] + len(sample))
    return struct.pack(f"<{len(offsets) + 1}I", len(rows), *offsets) + b"".join(made)


def index(formats: Sequence[str], spec: Any, **changes: Any) -> dict[str, Any]:
    config = {
        "compression": None,
        "data_format": list(formats),
        "data_spec": json.dumps([1, spec]),
        "encryption": None,
        "item_loader": "PyTreeLoader",
    }
    return {"chunks": [], "config": {**config, **changes}, "updated_at": "0"}


INDEX = index(["int", "str"], tree("dict", ["label", "text"], LEAF, LEAF))


def rows(count: int = 5) -> list[tuple[bytes, bytes]]:
    return [(struct.pack("<q", -i), ("ä" * i).encode()) for i in range(count)]


EXPECTED = [{"label": -i, "text": "ä" * i} for i in range(5)]


def samples(data: bytes, about: Any = INDEX) -> list[Any]:
    return list(LitDataFormat(about).samples(BytesFile(data, "chunk-0-0.bin")))


def test_samples_are_read_in_any_order_and_in_blocks_of_any_size() -> None:
    form, file = LitDataFormat(INDEX), BytesFile(chunk(rows()), "chunk-0-0.bin")
    assert list(form.samples(file)) == EXPECTED
    for block_nbytes in (1, 40, 1 << 20):
        found = []
        for block in form.index(file, block_nbytes):
            part = form.read(file, block)
            assert [part[i] for i in range(len(part))] == part[:]
            found += part[:]
        assert found == EXPECTED


def test_leaves_have_the_types_that_were_optimized() -> None:
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    leaves = {
        "bool": b"\1",
        "float": struct.pack("<d", 0.5),
        "bytes": b"\0\1",
        "numpy": struct.pack("<4I", 4, 2, 2, 3) + array.tobytes(),
        "no_header_numpy:9": np.arange(3, dtype=np.float32).tobytes(),
        "tensor": struct.pack(">4I", 11, 2, 2, 3) + array.tobytes(),
        "no_header_tensor:10": torch.arange(3, dtype=torch.bfloat16).view(torch.int16).numpy().tobytes(),
        "jpeg": b"\xff\xd8",
        "jpeg_array": struct.pack("<3I", 2, 1, 2) + b"abb",
        "pil": struct.pack("<3I", 3, 2, 1) + b"L" + array.tobytes(),
        "file:png": b"\x89PNG",
    }
    about = index(list(leaves), tree("dict", list(leaves), *[LEAF] * len(leaves)))
    (found,) = samples(chunk([list(leaves.values())]), about)
    assert tuple(found[name] for name in ("bool", "float", "bytes", "jpeg", "jpeg_array", "file:png")) == (
        True,
        0.5,
        b"\0\1",
        b"\xff\xd8",
        [b"a", b"bb"],
        b"\x89PNG",
    )
    assert np.array_equal(array, found["numpy"])
    assert np.array_equal(array, found["pil"])
    assert found["no_header_numpy:9"].dtype == np.float32
    assert torch.equal(torch.from_numpy(array), found["tensor"])
    assert torch.equal(torch.arange(3, dtype=torch.bfloat16), found["no_header_tensor:10"])


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (tree("tuple", None, LEAF, LEAF), {"0": 1, "1": "a"}),
        (tree("list", None, LEAF, tree("dict", ["b"], LEAF)), {"0": 1, "1": {"b": "a"}}),
        (tree("dict", ["x"], tree("list", None, LEAF, LEAF)), {"x": [1, "a"]}),
    ],
)
def test_trees_other_than_dicts_have_numbered_fields(spec: Any, expected: Any) -> None:
    data = chunk([(struct.pack("<q", 1), b"a")])
    assert [expected] == samples(data, index(["int", "str"], spec))


def test_a_single_value_is_the_field_data() -> None:
    assert samples(chunk([(struct.pack("<q", 3),)]), index(["int"], LEAF)) == [{"data": 3}]


def test_token_chunks_give_the_tokens_of_each_item() -> None:
    about = index(["no_header_tensor:16"], LEAF, item_loader="TokensLoader")
    data = chunk([(np.arange(n, dtype=np.int32).tobytes(),) for n in (3, 0, 2)], sized=False)
    assert [sample["tokens"].tolist() for sample in samples(data, about)] == [[0, 1, 2], [], [0, 1]]


def test_a_folder_with_its_index_is_read_as_it_is(tmp_path: Path) -> None:
    for number in range(3):
        part = [(struct.pack("<q", 5 * number + i), b"t") for i in range(5)]
        (tmp_path / f"chunk-0-{number}.bin").write_bytes(chunk(part))
    (tmp_path / "index.json").write_text(json.dumps(INDEX))

    def graph() -> pg.Graph:
        made = pg.Graph("litdata", seed=1)
        made.add(ops.ShardSelect(tmp_path)).then(ops.Load()).then(ops.Batch(4))
        return made

    pg.testing.assert_resumes_exactly(graph)
    with graph().loader() as loader:
        assert list(range(15)) == sorted(label for batch in loader for label in batch["label"].tolist())


def test_packed_chunks_are_one_block(tmp_path: Path) -> None:
    pack = pytest.importorskip("zstandard").compress
    (tmp_path / "index.json").write_text(json.dumps(INDEX))
    path = tmp_path / "chunk-0-0.zstd.bin"
    path.write_bytes(pack(chunk(rows())))
    with LocalFile(path) as file:
        form = format_of(path.name)
        (block,) = form.index(file, 1)
        assert form.read(file, block)[:] == EXPECTED


def test_without_an_index_the_way_to_read_tokens_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(bytes(64))
    with (
        LocalFile(path) as file,
        pytest.raises(DataError, match=r"no index.json beside it.*TokenFormat\('uint16'"),
    ):
        list(LitDataFormat().samples(file))
    with pytest.raises(DataError, match=r"name it: register_format\(LitDataFormat\('s3://"):
        list(LitDataFormat().samples(BytesFile(bytes(64), "s3://bucket/chunk-0-0.bin")))


def test_pickles_and_encrypted_chunks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Bomb:
        def __reduce__(self) -> Any:
            return open, ("pickle-was-run", "w")

    for form in ("pickle", "graph", "graph:pickle"):
        with pytest.raises(DataError, match="run code when they are read"):
            samples(chunk([(pickle.dumps(Bomb()),)]), index([form], LEAF))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="encrypted"):
        samples(chunk(rows()), index(["int"], LEAF, encryption={"level": "chunk"}))
    with pytest.raises(DataError, match="compressed batch by batch, which is not read here; optimize with"):
        samples(chunk(rows()), index(["int"], LEAF, compression="zstd", compression_level="batch"))
    with pytest.raises(DataError, match="'hologram' is not read here"):
        samples(chunk(rows()), index(["int", "hologram"], tree("tuple", None, LEAF, LEAF)))


PLAIN = [
    {
        "label": i - 3,
        "text": "ä" * i,
        "half": i / 2,
        "even": i % 2 == 0,
        "bytes": bytes(i),
        "ids": list(range(i)),
        "perhaps": None if i % 3 else [{"deep": i}],
        "none": None,
        "tree": {"words": ["a", "bb"][: i % 3], "deeper": {"x": [[i]]}},
    }
    for i in range(10)
]


def arrow_chunk(
    table: Any, batch_rows: int = 4, stream: bool = False, samples: bytes = b"", **options: Any
) -> bytes:
    """A chunk of dicts of plain values, as LitData writes it since 0.2.70."""
    arrow = pytest.importorskip("pyarrow", reason="the extra shards brings pyarrow")
    table = arrow.Table.from_pylist(table) if isinstance(table, list) else table
    sink = io.BytesIO()
    new = arrow.ipc.new_stream if stream else arrow.ipc.new_file
    with new(sink, table.schema, options=arrow.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, batch_rows)
    start = 4 + 4 * (len(table) + 1)
    ends = [start] * len(table) + [start + len(samples)]
    head = struct.pack(f"<{len(ends) + 1}I", len(table), *ends)
    return head + samples + sink.getvalue() + struct.pack("<I", sink.tell()) + b"LDARW01\0"


@pytest.mark.parametrize("changes", [{}, {"stream": True}, {"samples": b"as trees too"}])
def test_dicts_of_plain_values_are_read_from_their_arrow_rows(changes: Any) -> None:
    form, file = LitDataFormat(INDEX), BytesFile(arrow_chunk(PLAIN, **changes), "chunk-0-0.bin")
    assert list(form.samples(file)) == PLAIN
    for block_nbytes, counts in ((1, [4, 4, 2]), (1 << 20, [10])):
        blocks = list(form.index(file, block_nbytes))
        assert [block.samples for block in blocks] == counts
        rows = [
            row for block in blocks for row in map(form.read(file, block).__getitem__, range(block.samples))
        ]
        assert rows == PLAIN
        assert form.read(file, blocks[0])[1:-1] == PLAIN[1 : counts[0] - 1]


def test_rows_of_a_chunk_of_dicts_are_read_in_place() -> None:
    class Counting(ShardFile):
        read = 0

        def __init__(self, data: bytes) -> None:
            self.name, self.size, self._data = "chunk-0-0.bin", len(data), data

        def read_at(self, offset: int, nbytes: int) -> bytes:
            self.read += nbytes
            return self._data[offset : offset + nbytes]

        def close(self) -> None:
            pass

    file = Counting(arrow_chunk([{"image": bytes([i]) * 100_000, "label": i} for i in range(32)], 256))
    form = LitDataFormat(INDEX)
    (block,) = form.index(file)
    rows = form.read(file, block)
    assert file.read < 10_000
    assert rows[17] == {"image": bytes([17]) * 100_000, "label": 17}
    assert file.read < 110_000


def test_a_folder_of_dicts_of_plain_values_is_a_dataset(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"chunk-0-{number}.bin").write_bytes(
            arrow_chunk([{"label": 5 * number + i} for i in range(5)])
        )
    (tmp_path / "index.json").write_text(json.dumps(INDEX))

    def graph() -> pg.Graph:
        made = pg.Graph("litdata", seed=1)
        made.add(ops.ShardSelect(tmp_path)).then(ops.Load()).then(ops.Batch(4))
        return made

    pg.testing.assert_resumes_exactly(graph)
    with graph().loader() as loader:
        assert list(range(15)) == sorted(label for batch in loader for label in batch["label"].tolist())


def test_nulls_of_arrow_rows_are_those_of_the_same_columns_in_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    made = arrow.table(
        {
            "x": arrow.array([1.5, None]),
            "list": arrow.array([[1.0, None], None], arrow.list_(arrow.float64())),
            "text": arrow.array(["a", None]),
            "nested": arrow.array([{"x": None}, None], arrow.struct([("x", arrow.float64())])),
            "deep": arrow.array([[[None]], None], arrow.list_(arrow.list_(arrow.float64()))),
        }
    )
    path = tmp_path / "a.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(made, path)
    theirs = list(format_of(str(path)).samples(LocalFile(path)))
    plain = [{**row, "list": None if row["list"] is None else row["list"].tolist()} for row in theirs]
    assert repr(samples(arrow_chunk(made))) == repr(plain)


def test_arrow_rows_that_are_not_read_are_refused_by_name() -> None:
    arrow = pytest.importorskip("pyarrow", reason="the extra shards brings pyarrow")
    for table, options, told in (
        (PLAIN, {"compression": "zstd"}, "compressed inside Arrow's batches.*without compression="),
        (
            arrow.table({"a": arrow.array(["a"]).dictionary_encode()}),
            {},
            "dictionaries, for example.*not read",
        ),
        (
            arrow.table({"a": [datetime(2026, 1, 1, tzinfo=UTC)]}),
            {},
            r"type timestamp\[us, tz=UTC\] is not read",
        ),
    ):
        with pytest.raises(DataError, match=told):
            samples(arrow_chunk(table, **options))


def test_arrow_rows_that_lie_are_refused() -> None:
    whole = arrow_chunk(PLAIN)
    more = bytearray(whole)
    more[:4] = struct.pack("<I", 9)  # and the table's last place stays where it was
    for broken in (whole[:-1], whole[:-20], whole[: len(whole) // 2], bytes(more), whole[:-12] + whole[-8:]):
        with pytest.raises(ShardError):
            samples(broken)
    arrow = pytest.importorskip("pyarrow")
    twice = arrow.table([[1], [2]], names=["a", "a"])
    with pytest.raises(ShardError, match="two fields of one name"):
        samples(arrow_chunk(twice))


@settings(max_examples=300)
@given(st.data())
def test_any_damage_of_arrow_rows_is_an_error_of_the_shard_or_other_samples(data: st.DataObject) -> None:
    read_damaged("chunk-0-0.bin", arrow_chunk(PLAIN), data, LitDataFormat(INDEX), cut=False)


def test_an_index_is_parsed_once_for_all_blocks_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index.json").write_text(json.dumps(INDEX))
    path = tmp_path / "chunk-0-0.bin"
    path.write_bytes(chunk(rows()))
    parsed = []
    monkeypatch.setattr(litdata, "layout_of", lambda *of: parsed.append(of) or layout_of(*of))
    form = LitDataFormat()
    with LocalFile(path) as file:
        blocks = list(form.index(file, 1))
        assert [form.read(file, block)[0] for block in blocks] == EXPECTED
        assert (len(blocks), len(parsed)) == (5, 1)
        other = index(["int", "str"], tree("dict", ["number", "word"], LEAF, LEAF))
        (tmp_path / "index.json").write_text(json.dumps(other) + " ")
        assert form.read(file, blocks[1])[0] == {"number": -1, "word": "ä"}


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"config": None},
        index([], LEAF),
        index(["int", "str"], LEAF),
        index(["int"], tree("tuple", None, LEAF, LEAF)),
        index(["int", "str"], tree("dict", ["a"], LEAF, LEAF)),
        index(["int"], {"type": "os.system", "context": '"touch run"', "children_spec": [LEAF]}),
        index(["int"], 3),
        index([1], LEAF),
    ],
)
def test_an_index_that_is_none_is_refused(about: Any) -> None:
    with pytest.raises(ShardError, match="not an index of LitData's"):
        samples(chunk(rows()), about)


@pytest.mark.parametrize(
    ("form", "leaf"),
    [
        ("int", b"1"),
        ("numpy", b"123"),
        ("numpy", struct.pack("<3I", 4, 1, 1 << 31)),
        ("numpy", struct.pack("<2I", 4, 1 << 31)),
        ("tensor", struct.pack(">2I", 99, 0)),
        ("no_header_tensor:17", b"123"),
        ("no_header_numpy:99", b"123"),
        ("jpeg_array", struct.pack("<I", 1 << 31)),
        ("jpeg_array", struct.pack("<2I", 1, 9)),
        ("str", b"\xff"),
    ],
)
def test_leaves_that_lie_are_refused(form: str, leaf: bytes) -> None:
    with pytest.raises(ShardError):
        samples(chunk([(leaf,)]), index([form], LEAF))


@settings(max_examples=200)
@given(st.data())
def test_any_damage_is_a_shard_error_or_other_samples_and_never_another_error(data: st.DataObject) -> None:
    read_damaged("chunk-0-0.bin", chunk(rows()), data, LitDataFormat(INDEX))
