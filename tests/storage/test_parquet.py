"""Parquet: types by the schema, memory by what is decoded, columns and filters."""

import io
import random
from typing import Any

import numpy as np
import pytest

from pipegraph.errors import DataError, GraphError
from pipegraph.storage.formats import Block, format_of
from pipegraph.storage.formats.parquet import ParquetFormat
from pipegraph.storage.shard_files import BytesFile

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def written(table: Any, **how: Any) -> BytesFile:
    out = io.BytesIO()
    pq.write_table(table, out, **how)
    return BytesFile(out.getvalue(), "a.parquet")


def whole(file: BytesFile, form: ParquetFormat | None = None) -> tuple[ParquetFormat, Block, Any]:
    form = form or ParquetFormat()
    (block,) = form.index(file)
    return form, block, form.read(file, block)


def test_types_of_values_follow_from_the_schema_and_not_from_their_neighbours() -> None:
    lists = [[1.5, 2.0], [3.0, None], None, []] * 100
    file = written(pa.table({"x": pa.array(lists, pa.list_(pa.float32()))}))
    form, _, rows = whole(file)
    for found in (list(form.samples(file)), rows[:]):
        for value, expected in zip((row["x"] for row in found), lists, strict=True):
            if expected is None:
                assert value is None
            else:
                assert (value.dtype, value.shape) == (np.float32, (len(expected),))
                np.testing.assert_array_equal(value, np.array(expected, np.float32))


@pytest.mark.parametrize("value", [1, 1_000])
def test_nanoseconds_are_numpys_whatever_their_value(value: int) -> None:
    plain = pa.array([value, None])
    kinds = {"at": pa.timestamp("ns"), "took": pa.duration("ns"), "clock": pa.time64("ns")}
    file = written(pa.table({name: plain.cast(kind) for name, kind in kinds.items()}))
    first, second = whole(file)[2][:]
    assert first["at"] == np.datetime64(value, "ns")
    assert first["took"] == first["clock"] == np.timedelta64(value, "ns")
    assert {type(v) for v in first.values()} == {np.datetime64, np.timedelta64}
    assert second == {"at": None, "took": None, "clock": None}


def test_what_is_held_is_told_while_it_grows_and_can_be_refused() -> None:
    file = written(pa.table({"n": np.zeros(5_000_000, np.int64)}), use_dictionary=True)
    assert file.size < 100_000
    told: list[int] = []

    def room(nbytes: int) -> None:
        told.append(nbytes)
        if nbytes > 4_000_000:
            raise MemoryError("enough")

    form = ParquetFormat().within(room)
    (block,) = form.index(file)
    with pytest.raises(MemoryError, match="enough"):
        form.read(file, block)
    assert told == sorted(told)
    assert told[-1] < 10_000_000  # of 40 MB


def test_columns_and_a_filter_leave_out_what_is_not_asked_for() -> None:
    rng = random.Random(0)
    rows = [{"n": i, "s": str(i % 5), "big": rng.randbytes(500)} for i in range(3_000)]
    file = written(pa.Table.from_pylist(rows), row_group_size=400)
    form = ParquetFormat(["n"], [("s", "in", ["1", "3"]), ("n", ">=", 1_500)])
    form, block, held = whole(file, form)
    expected = [{"n": i} if i % 5 in (1, 3) and i >= 1_500 else None for i in range(3_000)]
    assert held[:] == expected
    assert list(form.samples(file)) == [row for row in expected if row is not None]
    assert form.held_nbytes(held, block) < 100_000


def test_columns_and_filters_that_do_not_fit_say_so() -> None:
    file = written(pa.table({"n": [1], "s": ["x"]}))
    for form in (ParquetFormat(["m"]), ParquetFormat(None, [("m", "=", 1)])):
        with pytest.raises(DataError, match=r"asks for the column 'm'; there are 'n', 's'"):
            list(form.samples(file))
    with pytest.raises(GraphError, match=r"filter=.* does not fit a\.parquet"):
        list(ParquetFormat(None, [("n", "<", "text")]).samples(file))
    with pytest.raises(GraphError, match="a Filter behind Load"):
        ParquetFormat(None, [lambda row: True])
    with pytest.raises(GraphError, match="have no columns"):
        format_of("a.tar").choosing(["x"], None)
