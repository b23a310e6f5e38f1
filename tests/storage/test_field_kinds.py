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
def test_a_sample_without_one_of_the_fields_is_refused(tmp_path: Path, write: Any) -> None:
    rows = [{"key": "a", "n": 1, "x": 2}, {"n": 1, "x": 2}]
    assert [row["key"] for row in write(tmp_path / "keys", "parquet", rows)] == ["000000001", "a"]
    for first in (1, None):
        with pytest.raises(DataError, match="sample 1 lacks the field 'x', which the first one has"):
            write(tmp_path / f"out-{first}", "parquet", [{"n": 1, "x": first}, {"n": 1}])
