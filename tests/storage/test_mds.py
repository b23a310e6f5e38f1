"""MDS shards, written here byte by byte as MosaicML Streaming documents them."""

import json
import pickle
import struct
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipegraph.errors import DataError, ShardError
from pipegraph.storage.formats import format_of
from pipegraph.storage.formats.mds import MdsFormat
from pipegraph.storage.shard_files import BytesFile

Column = tuple[str, str, int | None]


def mds(columns: Sequence[Column], rows: Sequence[Sequence[bytes]], **changes: Any) -> bytes:
    """A shard: columns as (name, encoding, size), rows as encoded values."""
    names, encodings, sizes = (list(each) for each in zip(*columns, strict=True))
    head = {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": [],
        "size_limit": 67108864,
        "column_names": names,
        "column_encodings": encodings,
        "column_sizes": sizes,
    }
    text = json.dumps({**head, **changes}, sort_keys=True).encode()
    samples = []
    for row in rows:
        lengths = [len(value) for value, size in zip(row, sizes, strict=True) if size is None]
        samples.append(struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(row))
    at = 4 + 4 * (len(rows) + 1) + len(text)
    offsets = [at]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample))
    return struct.pack(f"<{len(offsets) + 1}I", len(rows), *offsets) + text + b"".join(samples)


def int64(value: int) -> bytes:
    return struct.pack("<q", value)


COLUMNS: list[Column] = [("jpg", "jpeg:90", None), ("label", "int", 8), ("text", "str", None)]


def shard(count: int = 7, **changes: Any) -> bytes:
    return mds(COLUMNS, [(bytes([i]) * i, int64(-i), ("ä" * i).encode()) for i in range(count)], **changes)


def samples(data: bytes, name: str = "shard.00000.mds", form: Any = None) -> list[Any]:
    return list((form or format_of(name)).samples(BytesFile(data, name)))


EXPECTED = [{"jpg": bytes([i]) * i, "label": -i, "text": "ä" * i} for i in range(7)]


def test_samples_are_read_in_any_order_and_in_blocks_of_any_size() -> None:
    form, file = format_of("shard.00000.mds"), BytesFile(shard(), "a.mds")
    assert list(form.samples(file)) == EXPECTED
    for block_nbytes in (1, 30, 1 << 20):
        found = []
        for block in form.index(file, block_nbytes):
            rows = form.read(file, block)
            assert [rows[i] for i in range(len(rows))] == rows[:] == [*rows[:1], *rows[1:]]
            assert rows[-1] == rows[len(rows) - 1]
            found += rows[:]
        assert found == EXPECTED
    assert len(list(form.index(file, 1))) == 7
    assert len(list(form.index(file, 1 << 20))) == 1


def test_values_have_the_types_of_their_encodings() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    columns: list[Column] = [
        ("any", "ndarray", None),
        ("bytes", "bytes", None),
        ("dtype", "ndarray:float32", None),
        ("f2", "float16", 2),
        ("fixed", "ndarray:float32:2,3", 24),
        ("json", "json", None),
        ("money", "str_decimal", None),
        ("number", "str_int", None),
        ("pil", "pil", None),
        ("png", "png", None),
        ("u2", "uint16", 2),
        ("x", "str_float", None),
    ]
    row = (
        bytes([34, 2 << 2, 2, 3]) + array.tobytes(),
        b"\0\1",
        bytes([2 << 2 | 1]) + struct.pack("<2H", 2, 3) + array.tobytes(),
        np.float16(0.5).tobytes(),
        array.tobytes(),
        b'{"a": [1, null]}',
        b"1.10",
        b"123456789012345678901234567890",
        struct.pack("<3I", 2, 1, 3) + b"RGB" + bytes(range(6)),
        b"\x89PNG",
        struct.pack("<H", 65535),
        b"0.1",
    )
    (found,) = samples(mds(columns, [row]))
    for name in ("any", "dtype", "fixed"):
        assert found[name].dtype == np.float32
        assert found[name].flags.writeable
        assert np.array_equal(array, found[name])
    assert (found["bytes"], found["png"]) == (b"\0\1", b"\x89PNG")
    assert found["json"] == {"a": [1, None]}
    assert (Decimal("1.10"), 123456789012345678901234567890, 0.1) == tuple(
        found[name] for name in ("money", "number", "x")
    )
    assert [type(found[name]) for name in ("f2", "u2")] == [np.float16, np.uint16]
    assert (found["f2"], found["u2"]) == (0.5, 65535)
    assert found["pil"].tolist() == [[[0, 1, 2], [3, 4, 5]]]


def test_pickles_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Bomb:
        def __reduce__(self) -> Any:
            return open, ("pickle-was-run", "w")

    data = mds([("label", "int", 8), ("what", "pkl", None)], [(int64(1), pickle.dumps(Bomb()))])
    with pytest.raises(DataError, match=r"'what' holds pickles, which run code .* Load\(columns=\[...\]\)"):
        samples(data)
    assert samples(data, form=MdsFormat(["label"])) == [{"label": 1}]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no table"),
        (struct.pack("<4I", 2, 16, 12, 16), "not in order"),
        (shard(column_sizes=[None, -8, None]), "whole numbers or null"),
        (shard(column_encodings=["bytes", "uint16", "str"]), "8 bytes are no uint16"),
        (struct.pack("<3I", 1, 12, 12), "not an MDS shard"),
    ],
)  # fmt: skip
def test_shards_that_lie_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ShardError, match=message):
        samples(data)
