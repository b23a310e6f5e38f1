"""One limit for blocks and chunks together."""

from pathlib import Path
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.operators.shared_reader import Reading
from pipegraph.reader.block_reader import BlockReader
from pipegraph.storage import Manifest

LIMIT = 400_000


def graph_of(parts: Any, manifest: Manifest | None, order: pg.order.Order, **load: Any) -> pg.Graph:
    graph = pg.Graph("memory")
    select = ops.ShardSelect(parts, order=order, manifest=manifest)
    graph.add(select).then(ops.Load(**load), name="load", workers=2).then(ops.Batch(8, collate=list))
    return graph


def looked_at(loader: pg.Loader) -> tuple[int, BlockReader, list[int]]:
    """What chunks may take, the reader, and the bytes of both together at every batch of a pass."""
    together: list[int] = []
    for _ in loader:
        runtime = loader._crew
        assert runtime is not None
        assert runtime.run is not None
        reading = runtime._shared["load", "reading"]
        assert isinstance(reading, Reading)
        assert reading.reader is not None
        together.append(runtime.run.account.used + reading.reader._table.nbytes)
        found = runtime.run.account.limit, reading.reader
    return (*found, together)


@pytest.mark.parametrize("order", [pg.order.LaneOrder(lanes=4), pg.order.PartOrder()], ids=["lanes", "parts"])
def test_blocks_in_memory_and_chunks_share_the_loaders_limit(
    write_shards: Any, upload: Any, make_manifest: Any, order: pg.order.Order
) -> None:
    folder = write_shards("tar", 4, 100)
    graph = graph_of(f"{upload(folder)}/*", make_manifest(folder, block_nbytes=20_000), order)
    with graph.loader(memory_limit=LIMIT) as loader:
        for_chunks, reader, together = looked_at(loader)
        assert for_chunks + reader._source.budget() == LIMIT
    assert reader._source.budget() == LIMIT // 2
    assert max(together) <= LIMIT


def test_what_is_read_in_place_or_lies_in_the_cache_takes_nothing(
    write_shards: Any, upload: Any, make_manifest: Any, tmp_path: Path
) -> None:
    folder = write_shards("tar", 4, 100)
    cache = pg.NodeCache(tmp_path / "cache", "10 MB")
    for parts, load in ((folder / "part-*", {}), (f"{upload(folder)}/*", {"cache": cache})):
        graph = graph_of(parts, make_manifest(folder, block_nbytes=20_000), pg.order.LaneOrder(), **load)
        with graph.loader(memory_limit=LIMIT) as loader:
            for_chunks, _, _ = looked_at(loader)
        assert for_chunks == LIMIT


def test_blocks_that_are_decoded_count_also_where_their_bytes_lie_in_the_cache(
    write_shards: Any, upload: Any, make_manifest: Any, tmp_path: Path
) -> None:
    folder = write_shards("parquet", 4, 400)
    cache = pg.NodeCache(tmp_path / "cache", "10 MB")
    graph = graph_of(
        f"{upload(folder)}/*",
        make_manifest(folder, block_nbytes=20_000),
        pg.order.LaneOrder(lanes=3),
        cache=cache,
    )
    with graph.loader(memory_limit=LIMIT) as loader:
        for_chunks, reader, together = looked_at(loader)
        assert for_chunks + reader._source.budget() == LIMIT
    assert max(together) <= LIMIT
