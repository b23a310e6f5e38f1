"""Manifests: built in parallel, resumable, equal exactly if the data is."""

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from pipegraph.errors import DataError, ShardError
from pipegraph.order.layout import ManifestLike
from pipegraph.storage.formats import format_of
from pipegraph.storage.indexing import build_manifest
from pipegraph.storage.manifest import Manifest
from pipegraph.storage.shard_files import LocalFile, crc32c_extend, file_crc32c


def write_shard(path: Path, samples: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    with tarfile.open(path, "w") as archive:
        for i in range(samples):
            info = tarfile.TarInfo(f"{seed}-{i:04d}.jpg")
            info.size = int(rng.integers(0, 3000))
            archive.addfile(info, io.BytesIO(rng.bytes(info.size)))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(6):
        write_shard(folder / f"train-{number}.tar", 20 + number, number)
    return folder


def build(shards: Path, path: Path | None = None, **options: object) -> Manifest:
    return build_manifest(str(shards / "*.tar"), path, block_nbytes=10_000, workers=2, **options)  # type: ignore[arg-type]


def test_a_manifest_lists_parts_and_blocks_with_samples_and_checksums(shards: Path) -> None:
    manifest = build(shards)
    assert isinstance(manifest, ManifestLike)
    assert [20 + n for n in range(6)] == manifest.part_samples.tolist()
    assert len(manifest) == manifest.block_samples.sum() == 135
    assert manifest.blocks > 12
    seen = []
    for number in range(manifest.blocks):
        part, block = manifest.block(number)
        with LocalFile(manifest.parts[part].uri) as file:
            assert manifest.block_checksum(number) == file_crc32c(file, block.offset, block.nbytes)
            seen += [s["key"] for s in format_of("a.tar").read(file, block)]
    assert [f"{n}-{i:04d}" for n in range(6) for i in range(20 + n)] == seen
    for part_, crc in zip(manifest.parts, manifest.part_crc32c, strict=True):
        assert crc == crc32c_extend()(0, Path(part_.uri).read_bytes())


def test_a_manifest_comes_back_as_it_was_written(shards: Path, tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    manifest = build(shards, path)
    again = Manifest.load(path)
    assert manifest == again
    assert [os.path.abspath(p.uri) for p in manifest.parts] == [os.path.abspath(p.uri) for p in again.parts]
    for number in range(manifest.blocks):
        assert manifest.block(number) == again.block(number)
    assert manifest.block_crc32c.tolist() == again.block_crc32c.tolist()
    assert sorted(os.listdir(tmp_path)) == ["data", "index.json"]


def test_the_digest_changes_with_the_data_and_not_with_its_folder(shards: Path, tmp_path: Path) -> None:
    first = build(shards)
    data = bytearray((shards / "train-3.tar").read_bytes())
    data[600] ^= 1  # a byte of the first file
    (shards / "train-3.tar").write_bytes(data)
    assert first != build(shards)
    assert build(shards, checksums=False) == build(shards, checksums=False)


def test_a_broken_part_is_named_and_no_manifest_is_written(shards: Path, tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    (shards / "train-5.tar").write_bytes((shards / "train-5.tar").read_bytes()[:5000])
    with pytest.raises(ShardError, match=r"train-5.tar: truncated"):
        build(shards, path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=2), "version 2, this release reads 1"),
        (lambda m: m["parts"][0]["samples"].append(3), "not a manifest"),
        (lambda m: m["parts"][0]["offsets"].__setitem__(0, 10**12), "not a manifest"),
        (lambda m: m["parts"][0]["samples"].__setitem__(0, "1"), "not a manifest"),
        (lambda m: m["parts"][0]["samples"].__setitem__(0, 21), "was changed by hand"),
    ],
)
def test_a_manifest_that_was_tampered_with_is_refused(shards: Path, change: object, message: str) -> None:
    record = json.loads(build(shards).dumps())
    change(record)  # type: ignore[operator]
    with pytest.raises(DataError, match=message):
        Manifest.loads(json.dumps(record))


def test_a_part_whose_size_changed_is_refused(shards: Path, tmp_path: Path) -> None:
    from pipegraph.storage.part_files import open_part

    manifest = build(shards)
    with (shards / "train-0.tar").open("ab") as out:
        out.write(b"more")
    with pytest.raises(DataError, match="index again"):
        open_part(manifest.parts[0])
    (shards / "train-0.tar").unlink()
    with pytest.raises(DataError, match="cannot be opened: No such file"):
        open_part(manifest.parts[0])
