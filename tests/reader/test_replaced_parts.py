"""Parts that are replaced under a pipeline: their new bytes, or an error, never both versions and never the old ones."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import StoreError
from pipegraph.storage import build_manifest
from pipegraph.storage.stores import StoreClient

ROWS = 400


def array(version: int) -> Any:
    return np.full((ROWS, 50), version, dtype=np.int32)


def loader_of(parts: Any, **how: Any) -> Any:
    order = how.pop("order", pg.order.LaneOrder(lanes=2))
    load = ops.Load(cache=how.pop("cache", None))
    graph = pg.Graph("replaced")
    graph.add(ops.ShardSelect(parts, order=order, **how), name="select").then(load, name="load")
    return graph.loader()


def versions(samples: Any) -> set[int]:
    return {int(value) for sample in samples for value in np.unique(sample["array"])}


@pytest.mark.parametrize("order", [pg.order.LaneOrder(lanes=2), pg.order.PartOrder()], ids=["lanes", "parts"])
def test_a_file_that_is_overwritten_between_two_graphs_is_read_anew(tmp_path: Path, order: Any) -> None:
    path, cache = tmp_path / "a.npy", pg.NodeCache(tmp_path / "cache", "1 MB")
    for version in (1, 2):
        np.save(path, array(version))
        os.utime(path, ns=(version, version))
        with loader_of(path, cache=cache, order=order) as loader:
            assert versions(loader) == {version}


@pytest.mark.parametrize("order", [pg.order.LaneOrder(lanes=2), pg.order.PartOrder()], ids=["lanes", "parts"])
@pytest.mark.parametrize("listed", [True, False])
def test_an_object_with_a_new_etag_is_read_anew(
    tmp_path: Path, upload: Any, order: Any, listed: bool
) -> None:
    cache, folder = pg.NodeCache(tmp_path / "cache", "1 MB"), tmp_path / "data"
    folder.mkdir()
    np.save(folder / "a.npy", array(1))
    build_manifest(folder / "a.npy", folder / "_manifest.json", checksums=False)
    url = upload(folder)
    for version in (1, 2):
        np.save(folder / "a.npy", array(version))
        with StoreClient() as store:
            store.put(f"{url}/a.npy", (folder / "a.npy").read_bytes())
        with loader_of(f"{url}/*.npy" if listed else f"{url}/a.npy", cache=cache, order=order) as loader:
            assert versions(loader) == {version}


def test_an_object_that_is_replaced_in_the_middle_of_an_epoch_is_an_error(
    tmp_path: Path, upload: Any
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    np.save(folder / "a.npy", array(1))
    build_manifest(folder / "a.npy", folder / "_manifest.json", checksums=False, block_nbytes=20_000)
    url = upload(folder)
    np.save(folder / "a.npy", array(2))
    found = []
    with loader_of(f"{url}/a.npy", order=pg.order.LaneOrder(lanes=1, shuffle=False)) as loader:
        samples = iter(loader)
        found.append(next(samples))
        with StoreClient() as store:
            store.put(f"{url}/a.npy", (folder / "a.npy").read_bytes())
        try:
            found += samples
        except StoreError as error:
            assert "was replaced while it was in use" in str(error)  # noqa: PT017
    assert versions(found) == {1}
