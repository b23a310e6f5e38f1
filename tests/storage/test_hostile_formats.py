"""Shards made for harm: each is refused with a clear error, or does no harm."""

import gzip
import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pipegraph.errors import ShardError
from tests.storage.reading_shards import index, read_damaged, samples

MakeTar = Callable[..., Path]


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch pickle-was-run",)


def test_pickles_in_a_tar_are_only_bytes(
    make_tar: MakeTar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps(Bomb())
    assert [{"key": "a", "pkl": data, "pyd": data}] == samples(make_tar([("a.pkl", data), ("a.pyd", data)]))
    assert not (tmp_path / "pickle-was-run").exists()


def test_pickles_in_numpy_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    array = np.array([Bomb()], dtype=object)
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(ShardError, match="holds Python objects"):
        samples(tmp_path / "a.npy")
    with pytest.raises(ShardError, match="holds Python objects"):
        index(tmp_path / "a.npy")
    assert not (tmp_path / "pickle-was-run").exists()


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_packed_stream_cut_short_is_refused(tmp_path: Path, kind: str) -> None:
    lines = b"".join(b'{"n": %d}\n' % (i * 7919 % 10007) for i in range(20_000))
    if kind == "gz":
        data = gzip.compress(lines)
    else:
        data = pytest.importorskip("zstandard").compress(lines)
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(ShardError, match="broken"):
        samples(path)
    path.write_bytes(data)
    assert len(samples(path)) == 20_000


def shard_of(suffix: str) -> bytes:
    out = io.BytesIO()
    rows = [{"n": i, "text": "ä" * i} for i in range(12)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    match suffix:
        case ".tar":
            with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
                for row in rows:
                    info = tarfile.TarInfo(f"{'d' * 90}/{row['n']:020d}é.txt")
                    info.size = 100
                    archive.addfile(info, io.BytesIO(bytes(100)))
        case ".jsonl":
            return lines
        case ".jsonl.gz":
            return gzip.compress(lines, mtime=0)
        case ".jsonl.zst":
            return bytes(pytest.importorskip("zstandard").compress(lines))
        case ".npy":
            np.save(out, np.arange(60, dtype=np.int16).reshape(12, 5))
    return out.getvalue()


@pytest.mark.parametrize("suffix", [".tar", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".npy"])
@settings(max_examples=100)
@given(st.data())
def test_any_damage_is_a_shard_error_or_other_samples_and_never_another_error(
    suffix: str, data: st.DataObject
) -> None:
    read_damaged("a" + suffix, shard_of(suffix), data)
