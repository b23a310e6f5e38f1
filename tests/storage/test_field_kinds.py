"""The kinds of fields in shards that we write: what decides them, what fits, and what comes back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError
from pipegraph.storage import pack_shards
from tests.storage.reading_shards import written as samples

FORMATS = ["tar", "parquet"]
NUMBERS = [
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]
OTHERS = ["complex64", "complex128", "<U3", "S3", "V3", "longdouble"]
TIMES = [f"{kind}8[{unit}]" for kind in "mM" for unit in ("ns", "us", "ms", "s", "D")]
KEPT = {"tar": {"bool", *NUMBERS, *OTHERS, *TIMES}, "parquet": {"bool", *NUMBERS}}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["bool", *NUMBERS, ">i4", ">f8", *OTHERS, *TIMES])
def test_an_array_comes_back_with_its_dtype_or_is_refused(tmp_path: Path, format: str, dtype: str) -> None:
    rows = [np.array([0, 1, 1], "int64").astype(dtype), np.array([1], "int64").astype(dtype)]
    writer = pg.ShardWriter(tmp_path / "out", format)
    if not dtype.startswith(">") and dtype not in KEPT[format]:
        with pytest.raises(DataError, match="field 'a': .* has no arrays of") as caught, writer:
            writer.write({"a": rows[0]})
        assert np.dtype(dtype).name in str(caught.value)
        return
    with writer:
        for row in rows:
            writer.write({"a": row})
    for row, found in zip(rows, samples(tmp_path / "out"), strict=True):
        value = found["a"]
        assert isinstance(value, np.ndarray)
        assert value.dtype == (row.dtype if format == "tar" else row.dtype.newbyteorder("="))
        np.testing.assert_array_equal(value, row)


@pytest.mark.parametrize("format", FORMATS)
def test_a_time_in_json_is_refused_in_nanoseconds_too(tmp_path: Path, format: str) -> None:
    for unit in ("ns", "s"):
        time = np.datetime64(5, unit)
        for value in (time, {"at": time}, [time]):
            writer = pg.ShardWriter(tmp_path / f"{unit}-{type(value).__name__}", format)
            with pytest.raises(DataError, match="field 't'.*has no place in JSON"), writer:
                writer.write({"t": value})


def test_masks_are_a_tensor_in_a_batch_of_parquet_rows(tmp_path: Path) -> None:
    with pg.ShardWriter(tmp_path / "out", "parquet") as writer:
        for number in range(4):
            writer.write({"mask": np.arange(3) < number})
    graph = pg.Graph("masks")
    graph.add(ops.ShardSelect(tmp_path / "out", shuffle=False)).then(ops.Load()).then(ops.Batch(4))
    with graph.loader() as loader:
        (batch,) = loader
    assert torch.equal(batch["mask"], torch.arange(3) < torch.arange(4)[:, None])


def written_then_read(folder: Path, format: str, rows: Any) -> list[Any]:
    with pg.ShardWriter(folder, format) as writer:
        for row in rows:
            writer.write(row)
    return samples(folder)


def packed_then_read(folder: Path, format: str, rows: Any) -> list[Any]:
    pack_shards(iter(rows), folder, format=format)
    return samples(folder)


STREAMS = [written_then_read, packed_then_read]


@pytest.mark.parametrize("write", STREAMS)
def test_an_empty_list_does_not_decide_what_a_field_holds(tmp_path: Path, write: Any) -> None:
    values: list[Any] = [[], None, (), [1, 2], [], [3]]
    found = write(tmp_path / "ints", "parquet", [{"ids": value} for value in values])
    assert [row["ids"] if row["ids"] is None else row["ids"].tolist() for row in found] == [
        None if value is None else list(value) for value in values
    ]
    assert {row["ids"].dtype for row in found if row["ids"] is not None} == {np.dtype(np.int64)}
    masks = [[], np.array([True])]
    found = write(tmp_path / "masks", "parquet", [{"mask": mask} for mask in masks])
    assert [(row["mask"].tolist(), row["mask"].dtype) for row in found] == [([], bool), ([True], bool)]
    found = write(tmp_path / "json", "parquet", [{"words": words} for words in ([], ["a"], [])])
    assert [row["words"] for row in found] == ["[]", '["a"]', "[]"]


@pytest.mark.parametrize("write", STREAMS)
def test_the_first_value_that_is_none_does_not_decide_either(tmp_path: Path, write: Any) -> None:
    rows = [{"n": None, "x": 0.5}, {"n": None, "x": 1.5}, {"n": 3, "x": 2.5}]
    assert [row["n"] for row in write(tmp_path / "out", "parquet", rows)] == [None, None, 3]


def test_samples_that_wait_for_a_kind_are_those_that_were_given(tmp_path: Path) -> None:
    array, words, raw, tensor = np.zeros(2), ["a"], bytearray(b"0"), torch.zeros(2)
    with pg.ShardWriter(tmp_path / "out", "parquet") as writer:
        for number in range(5):
            array[:] = tensor[:] = number
            words[0], raw[:] = str(number), b"%d" % number
            late = None if number < 3 else number
            writer.write({"a": array, "w": words, "r": memoryview(raw), "t": tensor, "late": late})
    for number, row in enumerate(samples(tmp_path / "out")):
        assert row["a"].tolist() == row["t"].tolist() == [number] * 2
        assert (row["w"], row["r"]) == (f'["{number}"]', b"%d" % number)


def test_no_more_than_64_samples_or_a_shard_wait_for_a_kind(tmp_path: Path) -> None:
    format = "parquet"
    writer = pg.ShardWriter(tmp_path / "many", format)
    for _ in range(64):
        writer.write({"ids": []})
    with (
        pytest.raises(
            DataError, match=r"'ids' holds empty list .* array:int64 .* np\.array\(\[\], 'int64'\)"
        ),
        writer,
    ):
        writer.write({"ids": [1]})
    writer = pg.ShardWriter(tmp_path / "large", format, size="1 kB")
    writer.write({"ids": [], "data": bytes(1000)})
    with pytest.raises(DataError, match=r"sample 1: .*'ids' holds empty list|'ids' holds empty list"), writer:
        writer.write({"ids": [1], "data": b""})
    (found, _) = written_then_read(tmp_path / "none", format, [{"ids": []}] * 2)
    assert found["ids"] == "[]"


@pytest.mark.parametrize("write", STREAMS)
@pytest.mark.parametrize(
    ("first", "odd", "kind"),
    [
        ({"a": 1}, 5, "int"),
        ({"a": 1}, "x", "text"),
        ({"a": 1}, True, "bool"),
        ({"a": 1}, [1], "array:int64"),
        (["a"], np.ones(2), "array:float64"),
        (["a"], b"x", "bytes"),
        ([["a"]], 0.5, "float"),
    ],
)
def test_a_field_of_json_takes_no_other_value(
    tmp_path: Path, write: Any, first: Any, odd: Any, kind: str
) -> None:
    with pytest.raises(
        DataError, match=f"'v' holds json .*, and {kind} in this one; make all values"
    ) as caught:
        write(tmp_path / "out", "parquet", [{"v": first}, {"v": odd}])
    assert "ShardWriter: sample 1" in caught.value.__notes__
    assert not list((tmp_path / "out").glob("shard*"))
    with pytest.raises(DataError, match="field 'v' is (json|empty list) in one sample and|'v' holds json"):
        pack_shards([{"v": first}, {"v": odd}], tmp_path / "list", format="parquet", workers=1)


@pytest.mark.parametrize("odd", [5, "x", True, b"x", 0.5])
def test_an_empty_list_and_a_number_or_text_are_of_two_kinds(tmp_path: Path, odd: Any) -> None:
    for place, rows in enumerate(([[], odd], [odd, []])):
        for write in STREAMS:
            with pytest.raises(DataError, match="field 'v' (is|holds) .*empty list") as caught:
                write(tmp_path / f"{place}-{write.__name__}", "parquet", [{"v": value} for value in rows])
            assert "ShardWriter: sample 1" in caught.value.__notes__


@pytest.mark.parametrize("write", STREAMS)
def test_a_sample_without_one_of_the_fields_is_refused(tmp_path: Path, write: Any) -> None:
    rows = [{"key": "a", "n": 1, "x": 2}, {"n": 1, "x": 2}]
    assert [row["key"] for row in write(tmp_path / "keys", "parquet", rows)] == ["000000001", "a"]
    for first in (1, None):
        with pytest.raises(DataError, match="sample 1 lacks the field 'x', which those looked at first have"):
            write(tmp_path / f"out-{first}", "parquet", [{"n": 1, "x": first}, {"n": 1}])


def test_a_file_whose_fields_differ_is_named(tmp_path: Path) -> None:
    # The two samples had no name: nobody finds them among a million files.
    for name in ("a.jpg", "b.jpg", "c.jpg", "c.jpg.jpg"):
        (tmp_path / "files" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "files" / name).write_bytes(b"x")
    named = r"sample 2 \('c'\) has the field 'jpg.jpg'"
    with pytest.raises(DataError, match=named):
        pack_shards(tmp_path / "files", tmp_path / "out", format="parquet")


@pytest.mark.parametrize("odd", ["text", object()])
def test_a_sample_of_a_dataset_whose_value_is_of_another_kind_is_named(tmp_path: Path, odd: Any) -> None:
    with pytest.raises(DataError, match="field 'v'") as caught:
        pack_shards([{"key": "a", "v": 1}, {"key": "b", "v": odd}], tmp_path, format="parquet", workers=1)
    assert "sample 1 ('b') of the source" in caught.value.__notes__


def test_an_error_among_the_samples_that_wait_leaves_nothing_open(tmp_path: Path) -> None:
    writer = pg.ShardWriter(tmp_path / "out", "parquet")
    for value in (np.zeros(1), np.zeros((2, 2)), np.zeros(1)):
        writer.write({"x": value, "late": None})
    with pytest.raises(DataError, match=r"not arrays of shape \(2, 2\)") as caught:
        writer.close()
    assert "ShardWriter: sample 1" in caught.value.__notes__
    assert not [path for path in (tmp_path / "out").iterdir() if "shard" in path.name]
    with pg.ShardWriter(tmp_path / "out", "parquet") as again:
        again.write({"x": np.zeros(1), "late": None})
    assert len(samples(tmp_path / "out")) == 1


def test_a_kind_that_a_format_has_not_is_not_kept_for_the_next_run(tmp_path: Path) -> None:
    for write in (packed_then_read, lambda out, form, rows: pack_shards(rows, out, format=form, workers=1)):
        out = tmp_path / write.__name__.strip("<>")
        with pytest.raises(DataError, match="Parquet has no arrays of complex64"):
            write(out, "parquet", [{"x": np.zeros(1, "complex64")}])
        write(out, "parquet", [{"x": np.zeros(1, np.uint8)}])
        assert samples(out)[0]["x"].dtype == np.uint8
