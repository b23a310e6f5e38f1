"""Listing and reading on each kind of store: what the two say of an object's version is the same, however it is written."""

from collections.abc import Callable

import pytest
from clouds import PAGES, Cloud, serve

from pipegraph.errors import StoreError
from pipegraph.storage import NodeCache
from pipegraph.storage.block_bytes import BlockBytes
from pipegraph.storage.formats import Block
from pipegraph.storage.parts import expand_parts
from pipegraph.storage.requests import Backoff
from pipegraph.storage.stores import StoreClient

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
            with BlockBytes(store, cache).open(part, Block(0, part.size, 0, 1)) as file:
                found[part.name] = file.read_at(0, part.size)
        return found


AT_ONCE = Backoff(deadline_s=0, min_rate=1e9)


REFUSALS = {
    "redirects": (
        "s3",
        (302, {"Location": "/data/a.bin"}),
        "redirect",
    ),
    "region": (
        "s3",
        (301, {}),
        "incorrectly configured region",
    ),
    "http": ("http", (302, {"Location": "/data/a.bin"}), "error following redirect"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_a_retry_cannot_help_is_an_error_at_once(case: str) -> None:
    kind, answer, told = REFUSALS[case]
    with serve(Cloud(kind, {}, instead={"a.bin": answer})) as cloud, StoreClient(cloud.options) as store:
        for ask in (lambda: store.head(cloud.url + "a.bin"), lambda: store.read(cloud.url + "a.bin", 0, 5)):
            with pytest.raises(StoreError, match=told):
                ask()
        assert store.counts["retried"] == 0


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
