"""Odd things where a path is expected: bytes work as names of files do; what is no path is refused by name."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError, GraphError
from pipegraph.storage import Manifest, build_manifest, pack_shards
from pipegraph.storage.parts import expand_parts


class Named:
    """A ``PathLike`` that gives whatever it was given."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def __fspath__(self) -> Any:
        return self.path


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paths") / "shards"
    pack_shards([{"n.txt": str(number).encode()} for number in range(4)], folder)
    return folder


ONE: dict[str, Callable[[Any], Any]] = {
    "ListFiles: root": lambda path: ops.ListFiles(path),
    "ShardSelect: manifest": lambda path: ops.ShardSelect("x", manifest=[path]),
    "NodeCache: folder": lambda path: pg.NodeCache(path, "1 MB"),
    "the folder for the shards": lambda path: pg.ShardWriter(path),
    "Manifest.load: path": lambda path: Manifest.load(path),
}
LISTS: dict[str, Callable[[Any], Any]] = {
    "ShardSelect: parts": lambda path: ops.ShardSelect(path),
    "parts": lambda path: expand_parts(path),
}


@pytest.mark.parametrize(
    "given", [None, 5, 1.5, True, Named(5), {}, object()], ids=lambda given: type(given).__name__
)
@pytest.mark.parametrize("which", [*ONE, *LISTS])
def test_what_is_no_path_is_refused_by_name(which: str, given: Any) -> None:
    with pytest.raises(GraphError, match=f"^{which}.* must be a .*path.*got "):
        {**ONE, **LISTS}[which]([given] if which in LISTS else given)


@pytest.mark.parametrize(
    "given", [None, 5, object(), io.StringIO("a.tar\nb.tar")], ids=lambda given: type(given).__name__
)
@pytest.mark.parametrize("which", LISTS)
def test_what_is_neither_a_path_nor_several_is_refused_by_name(which: str, given: Any) -> None:
    with pytest.raises(
        GraphError, match=f"^{which} must be a glob, a folder, a URL or a list of these, got "
    ):
        LISTS[which](given)


@pytest.mark.parametrize("which", ["ListFiles: root", "NodeCache: folder", *LISTS])
@pytest.mark.parametrize("given", ["", b"", "a\0b"], ids=repr)
def test_names_that_no_file_can_have_are_refused(which: str, given: Any) -> None:
    with pytest.raises(GraphError, match=f"^{which}.* must be a path, got .*; (the current|no file's)"):
        {**ONE, **LISTS}[which](given)


def test_a_manifest_is_not_written_to_what_is_no_path(shards: Path) -> None:
    with pytest.raises(GraphError, match="^build_manifest: path must be a path"):
        build_manifest(shards, 5)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=r"^Manifest.save: path must be a path"):
        build_manifest(shards).save(None)  # type: ignore[arg-type]


def samples(graph: pg.Graph) -> list[Any]:
    with graph.loader() as loader:
        return list(loader)


@pytest.mark.parametrize(
    "as_given", [os.fsencode, lambda path: Named(os.fsencode(path))], ids=["bytes", "PathLike"]
)
def test_bytes_name_files_as_text_does(shards: Path, tmp_path: Path, as_given: Callable[[Any], Any]) -> None:
    def shard_samples(parts: Any, **options: Any) -> list[Any]:
        graph = pg.Graph("shards")
        graph.add(ops.ShardSelect(parts, shuffle=False, **options)).then(ops.Load())
        return [each["n.txt"] for each in samples(graph)]

    whole = [b"0", b"1", b"2", b"3"]
    [shard] = shards.glob("*.tar")
    assert shard_samples(as_given(shards)) == whole
    assert shard_samples(iter([as_given(shard)]), manifest=as_given(shards / "_manifest.json")) == whole
    assert shard_samples({as_given(shard)}) == shard_samples(np.array([str(shard)])) == whole
    assert len(build_manifest([as_given(shard)], as_given(tmp_path / "_manifest.json"))) == 4
    assert len(Manifest.load(as_given(tmp_path / "_manifest.json"))) == 4
    assert len(pack_shards(as_given(shards), as_given(tmp_path / "again"))) == 4
    assert len(pack_shards([as_given(shard)], tmp_path / "once more")) == 4

    files = pg.Graph("files")
    files.add(ops.ListFiles(as_given(shards), pattern="*.tar")).then(ops.Load())
    [found] = samples(files)
    assert found["path"] == str(shard)

    np.arange(8, dtype=np.int32).tofile(tmp_path / "tokens.bin")
    tokens = pg.Graph("tokens")
    tokens.add(ops.FromTokens(as_given(tmp_path / "tokens.bin"), 4, dtype="int32"))
    assert len(samples(tokens)) == 2
    with pg.NodeCache(as_given(tmp_path / "cache"), "1 MB") as cache:
        assert cache.folder == str(tmp_path / "cache")


@pytest.mark.parametrize("given", [0, True, None, 5.0])
def test_a_number_as_the_path_of_a_sample_is_no_open_file(given: Any) -> None:
    graph = pg.Graph("files")
    graph.add(ops.FromIterable([{"path": given}])).then(ops.Load())
    with pytest.raises(DataError, match="Load: a sample's 'path' must be a path, got "):
        samples(graph)
