"""Stores of other schemes: the example of docs/reader.md, fsspec's filesystems, and what goes wrong in them."""

import re
from pathlib import Path
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import StoreError
from pipegraph.storage import build_manifest, register_store

pytest.importorskip("obstore", reason="the cloud extra brings obstore")
PAGE = Path(__file__).parents[2] / "docs" / "reader.md"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    with pg.ShardWriter(tmp_path / "data", "tar", size="4 kB") as writer:
        for number in range(20):
            writer.write({"key": f"{number:02}", "x": number})
    build_manifest(tmp_path / "data", tmp_path / "data" / "_manifest.json")
    return tmp_path / "data"


def read(parts: Any, **options: Any) -> list[int]:
    graph = pg.Graph("other stores")
    graph.add(ops.ShardSelect(parts, **options)).then(ops.Load())
    with graph.loader() as loader:
        return sorted(sample["x"] for sample in loader)


def test_the_store_of_the_page_is_read_by_folder_glob_and_name(shards: Path) -> None:
    code = next(c for c in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "class Mirror" in c)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
    store = {"folder": str(shards.parent)}
    for parts in ("mirror://photos/data/", "mirror://photos/**/*.tar"):
        assert read(parts, store=store, order=pg.order.PartOrder()) == list(range(20))
        assert read(parts, store=store) == list(range(20))  # by the manifest beside them
    with pytest.raises(StoreError, match=r"no object matches in 'mirror://photos/data/'"):
        read("mirror://photos/data/*.parquet", store=store)
    with pytest.raises(StoreError, match=r"mirror://photos/data/no\.tar: .*No such file"):
        read("mirror://photos/data/no.tar", store=store, order=pg.order.PartOrder())


def test_fsspecs_filesystems_are_read(shards: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="the fsspec extra")
    files = fsspec.filesystem("memory")
    files.put(str(shards), "/there", recursive=True)
    register_store("fsmem", lambda root, options: Memory(root))
    assert (
        read("fsmem://there/") == read("fsmem://there/*.tar", order=pg.order.PartOrder()) == list(range(20))
    )
    with pytest.raises(StoreError, match=r"nosuch://there: Protocol not known: nosuch"):
        read("nosuch://there/*.tar", order=pg.order.PartOrder())


class Memory:
    """fsspec's memory filesystem, whose own scheme is obstore's, with a connection that breaks now and then."""

    def __init__(self, root: str) -> None:
        from pipegraph.storage.stores import FsspecStore

        self._root, self._store = root, FsspecStore("memory://there", {})
        self._calls = 0

    def _there(self, url: str) -> str:
        self._calls += 1
        if self._calls % 3 == 1:
            raise ConnectionResetError("gone")
        return url.replace(self._root, "memory://there")

    def read(self, url: str, start: int, stop: int) -> bytes:
        return self._store.read(self._there(url), start, stop)

    def size(self, url: str) -> int:
        return self._store.size(self._there(url))

    def list(self, url: str) -> list[str]:
        return [found.replace("memory://there", self._root) for found in self._store.list(self._there(url))]
