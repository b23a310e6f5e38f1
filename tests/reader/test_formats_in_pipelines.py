"""Every format through ShardSelect and Load: each sample once, with its bytes, from wherever it lies."""

from pathlib import Path
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError
from pipegraph.storage.formats import format_of
from pipegraph.storage.shard_files import LocalFile
from pipegraph.testing import assert_resumes_exactly, assert_same_everywhere

FORMATS = ("tar", "parquet", "jsonl", "jsonl.gz", "npy")


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in sample.items()}


def stored(folder: Path, form: str) -> list[str]:
    """All samples of a folder, read part after part, in a form that can be sorted."""
    found = []
    for path in sorted(folder.glob(f"*.{form}")):
        with LocalFile(path) as file:
            found += [repr(plain(sample)) for sample in format_of(path.name).samples(file)]
    return sorted(found)


def graph_of(select: ops.ShardSelect, load: ops.Load, size: int = 8) -> pg.Graph:
    graph = pg.Graph("shards", seed=3)
    graph.add(select).then(load, workers=2).then(ops.Batch(size, collate=list))
    return graph


def read(select: ops.ShardSelect, load: ops.Load, **options: Any) -> list[Any]:
    with graph_of(select, load).loader(**options) as loader:
        return [sample for batch in loader for sample in batch]


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_sample_comes_once_from_place_memory_and_cache(
    form: str, write_shards: Any, upload: Any, make_manifest: Any, tmp_path: Path
) -> None:
    folder = write_shards(form)
    manifest, url = make_manifest(folder), upload(folder)
    here = read(ops.ShardSelect(folder, manifest=manifest), ops.Load())
    assert sorted(repr(plain(sample)) for sample in here) == stored(folder, form)
    cache = pg.NodeCache(tmp_path / "cache", "10 MB")
    for select, load in (
        (ops.ShardSelect(f"{url}/*", manifest=manifest), ops.Load()),
        (ops.ShardSelect(f"{url}/*", manifest=manifest), ops.Load(preload=False)),
        (ops.ShardSelect(f"{url}/*", manifest=manifest), ops.Load(cache=cache)),
        (ops.ShardSelect(folder, manifest=manifest), ops.Load(cache=cache)),
    ):
        assert [plain(sample) for sample in read(select, load)] == [plain(sample) for sample in here]
    assert cache.usage() >= manifest.block_nbytes.sum()


def test_every_step_can_be_resumed(form: str, write_shards: Any, upload: Any, make_manifest: Any) -> None:
    folder = write_shards(form, 3, 12)
    manifest, url = make_manifest(folder), upload(folder)
    assert_resumes_exactly(lambda: graph_of(ops.ShardSelect(f"{url}/*", manifest=manifest), ops.Load()))


@pytest.mark.parametrize(
    "order",
    [
        pg.order.LaneOrder(lanes=4, window=2),
        pg.order.PartOrder(),
        pg.order.StridedOrder(shuffle=True),
        pg.order.BlockOrder(shuffle=True),
    ],
    ids=lambda order: type(order).__name__,
)
def test_every_order_resumes_at_every_step_and_is_the_same_everywhere(
    order: pg.order.Order, write_shards: Any, make_manifest: Any
) -> None:
    folder = write_shards("tar", 3, 12)
    manifest = make_manifest(folder)
    make = lambda: graph_of(ops.ShardSelect(folder, order=order, manifest=manifest), ops.Load())  # noqa: E731
    assert_resumes_exactly(make)
    assert_same_everywhere(make)


@pytest.mark.parametrize("shuffle", [True, False])
def test_whole_parts_need_no_manifest_wherever_they_lie(
    form: str, shuffle: bool, write_shards: Any, upload: Any, tmp_path: Path
) -> None:
    folder = write_shards(form)
    url = upload(folder)
    order = pg.order.PartOrder(shuffle=shuffle)
    here = [plain(sample) for sample in read(ops.ShardSelect(folder, order=order), ops.Load())]
    assert sorted(map(repr, here)) == stored(folder, form)
    names = f"{url}/part-{{00..03}}.{form}"
    for load in (ops.Load(), ops.Load(cache=pg.NodeCache(tmp_path / "cache", "10 MB"))):
        assert [plain(sample) for sample in read(ops.ShardSelect(names, order=order), load)] == here


def test_a_manifest_beside_remote_shards_is_found(write_shards: Any, upload: Any, make_manifest: Any) -> None:
    folder = write_shards("tar")
    manifest = make_manifest(folder)
    manifest.save(folder / "_manifest.json")
    url = upload(folder)
    found = ops.ShardSelect(f"{url}/part-{{00..03}}.tar").manifest()
    assert found.digest == manifest.digest
    assert found.parts[0].uri == f"{url}/part-00.tar"
    assert ops.ShardSelect(f"{url}/part-{{01..02}}.tar").manifest().parts[0].name == "part-01.tar"
    again = ops.ShardSelect(f"{url}/part-{{00..03}}.tar", manifest=f"{url}/_manifest.json")
    assert again.manifest().digest == manifest.digest


def test_remote_shards_without_a_manifest_are_an_error_that_says_what_to_do(
    write_shards: Any, upload: Any
) -> None:
    url = upload(write_shards("tar"))
    with pytest.raises(
        GraphError, match=r"run `pipegraph index PARTS` .* or use order=pg.order.PartOrder\(\)"
    ):
        ops.ShardSelect(f"{url}/*.tar").manifest()
