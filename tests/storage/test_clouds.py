"""Listing and reading on each kind of store: what the two say of an object's version is the same, however it is written."""

from collections.abc import Callable
from pathlib import Path

import pytest
from clouds import PAGES, Cloud, serve

from pipegraph.errors import StoreError
from pipegraph.storage import NodeCache, StoreClient, expand_parts, open_block
from pipegraph.storage.formats import Block
from pipegraph.storage.parts import Part
from pipegraph.storage.retries import Backoff

pytest.importorskip("obstore", reason="the cloud extra brings obstore")


def everything(
    cloud: Cloud, cache: NodeCache | None = None, between: Callable[[], None] = lambda: None
) -> dict[str, bytes]:
    """All objects by name, listed and then read."""
    with StoreClient(cloud.options, retry=AT_ONCE) as store:
        parts = expand_parts(cloud.url + "*.bin", store=store)
        between()
        found = {}
        for part in parts:
            assert part.size is not None
            with open_block(part, Block(0, part.size, 0, 1), store=store, cache=cache) as file:
                found[part.name] = file.read_at(0, part.size)
        return found


AT_ONCE = Backoff(deadline_s=0, min_rate=1e9)
OBJECTS = {"a.bin": b"a" * 10, "b.bin": b"b" * 20}


ETAGS = [
    ('"{v}"', '"{v}"'),
    ("{v}", '"{v}"'),  # Azure's
    ("&quot;{v}&quot;", '"{v}"'),
    ('W/"{v}"', '"{v}"'),
    ('"{v}"', 'W/"{v}"'),
    (None, '"{v}"'),
    ('"{v}"', None),
    (None, None),
]
"""In a listing and in an answer; of GCS and Azure the client library takes no answer without."""


@pytest.mark.parametrize(
    ("kind", "listed", "read"),
    [(kind, *etags) for kind in PAGES for etags in ETAGS if etags[1] or kind in ("s3", "http")],
)
def test_what_was_listed_is_read_on_every_store(kind: str, listed: str | None, read: str | None) -> None:
    with serve(Cloud(kind, dict(OBJECTS), listed, read)) as cloud:
        assert everything(cloud) == OBJECTS


@pytest.mark.parametrize("kind", PAGES)
def test_what_was_replaced_between_listing_and_reading_is_refused_on_every_store(kind: str) -> None:
    with serve(Cloud(kind, dict(OBJECTS), listed="{v}" if kind == "az" else '"{v}"', read='"{v}"')) as cloud:

        def replace() -> None:
            cloud.objects["b.bin"] = b"B" * 20

        with pytest.raises(StoreError, match=r"b\.bin: the object was replaced while it was in use"):
            everything(cloud, between=replace)


@pytest.mark.parametrize("kind", PAGES)
def test_a_cache_finds_what_another_rank_fetched_after_it_asked_for_the_version(
    kind: str, tmp_path: Path
) -> None:
    with (
        serve(Cloud(kind, dict(OBJECTS), listed="{v}", read='W/"{v}"')) as cloud,
        NodeCache(tmp_path, "1 MB") as cache,
    ):
        assert everything(cloud, cache) == OBJECTS
        with StoreClient(cloud.options) as store:  # knows the name alone
            part = Part(cloud.url + "a.bin")
            with open_block(part, Block(0, 10, 0, 1), store=store, cache=cache) as file:
                assert file.read_at(0, 10) == OBJECTS["a.bin"]
        assert (cache.stats.hits, cache.stats.misses) == (1, 2)
