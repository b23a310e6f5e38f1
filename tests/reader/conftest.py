"""Real shards of every format, on disk and in stores."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipegraph.storage import Manifest, build_manifest
from pipegraph.storage.stores import StoreClient

PARTS, SAMPLES = 4, 30


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests that are made on the way go nowhere else."""
    monkeypatch.setenv("PIPEGRAPH_CACHE", str(tmp_path / "made"))


def write_part(path: Path, part: int, samples: int) -> None:
    """One part of the format that its suffix names; sample i of it holds ``part`` and ``i`` in some form."""
    rng = random.Random(part)
    suffix = path.name.partition(".")[2]
    if suffix == "tar":
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
            for i in range(samples):
                for name, data in ((f"{part}-{i}.bin", rng.randbytes(200)), (f"{part}-{i}.cls", b"%d" % i)):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    elif suffix == "parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        rows = {
            "key": [f"{part}-{i}" for i in range(samples)],
            "x": [rng.randbytes(300) for _ in range(samples)],
        }
        pq.write_table(pa.table(rows), path, row_group_size=8)
    elif suffix.startswith("jsonl"):
        lines = "".join(
            json.dumps({"key": f"{part}-{i}", "x": rng.randbytes(150).hex()}) + "\n" for i in range(samples)
        ).encode()
        path.write_bytes(gzip.compress(lines, mtime=0) if suffix.endswith("gz") else lines)
    else:
        np.save(path, np.arange(samples * 80, dtype=np.int32).reshape(samples, 80) + 10_000_000 * part)


WriteShards = Callable[..., Path]


@pytest.fixture
def write_shards(tmp_path: Path) -> WriteShards:
    """A folder of parts of one format, unequal in length."""

    def write(form: str = "tar", parts: int = PARTS, samples: int = SAMPLES) -> Path:
        folder = tmp_path / f"shards-{form}-{parts}-{samples}"
        if not folder.exists():
            folder.mkdir()
            for part in range(parts):
                write_part(folder / f"part-{part:02}.{form}", part, samples + part)
        return folder

    return write


@pytest.fixture
def make_manifest() -> Callable[..., Manifest]:
    """Of all parts in a folder, in small blocks."""

    def make(folder: Path, checksums: bool = True, block_nbytes: int = 4_000) -> Manifest:
        return build_manifest(sorted(folder.glob("part-*")), block_nbytes=block_nbytes, checksums=checksums)

    return make


_buckets = itertools.count()


@pytest.fixture
def upload() -> Callable[[Path], str]:
    """Put the parts of a folder into a store in memory; its URL."""

    def put(folder: Path) -> str:
        root = f"memory://bucket-{next(_buckets)}"
        with StoreClient() as store:
            for path in folder.iterdir():
                store.put(f"{root}/{path.name}", path.read_bytes())
        return root

    pytest.importorskip("obstore", reason="the cloud extra brings obstore")
    return put
