"""The kinds of fields in shards that we write: what decides them, what fits, and what comes back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipegraph as pg
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


@pytest.mark.parametrize("write", STREAMS)
def test_a_sample_without_one_of_the_fields_is_refused(tmp_path: Path, write: Any) -> None:
    rows = [{"key": "a", "n": 1, "x": 2}, {"n": 1, "x": 2}]
    assert [row["key"] for row in write(tmp_path / "keys", "parquet", rows)] == ["000000001", "a"]
    for first in (1, None):
        with pytest.raises(DataError, match="sample 1 lacks the field 'x', which those looked at first have"):
            write(tmp_path / f"out-{first}", "parquet", [{"n": 1, "x": first}, {"n": 1}])
