"""Parquet: types by the schema, memory by what is decoded, columns."""

import io
import random
from typing import Any

import numpy as np
import pytest

from pipegraph.storage.formats import Block
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


def test_columns_leave_out_what_is_not_asked_for() -> None:
    rng = random.Random(0)
    rows = [{"n": i, "s": str(i % 5), "big": rng.randbytes(500)} for i in range(3_000)]
    file = written(pa.Table.from_pylist(rows), row_group_size=400)
    form, block, held = whole(file, ParquetFormat(["n"]))
    assert held[:] == list(form.samples(file)) == [{"n": i} for i in range(3_000)]
    assert form.held_nbytes(held, block) < 100_000
