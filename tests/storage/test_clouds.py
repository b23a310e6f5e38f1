"""Listing and reading on each kind of store: what the two say of an object's version is the same, however it is written."""

import ssl
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from clouds import PAGES, Cloud, serve

from pipegraph.errors import DataError, StoreError
from pipegraph.storage import NodeCache
from pipegraph.storage.beside import load_beside
from pipegraph.storage.formats import Block
from pipegraph.storage.open_blocks import open_block
from pipegraph.storage.parts import Part, expand_parts
from pipegraph.storage.retries import Backoff
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
            with open_block(part, Block(0, part.size, 0, 1), store=store, cache=cache) as file:
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
        assert store.stats.retried == 0


@pytest.fixture(scope="module")
def tls() -> ssl.SSLContext:
    """A server's, with a certificate that nobody has signed."""
    x509 = pytest.importorskip("cryptography.x509", reason="moto, of the test extra, brings cryptography")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(1), now + timedelta(1))
    coding = serialization.Encoding.PEM
    secret = key.private_bytes(coding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        file.write(made.sign(key, hashes.SHA256()).public_bytes(coding) + secret)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def test_a_certificate_that_is_not_trusted_is_an_error_at_once(tls: ssl.SSLContext) -> None:
    with serve(Cloud("s3", {}), tls) as cloud:
        options = {**cloud.options, "endpoint": f"https://127.0.0.1:{cloud.port}"}
        with StoreClient(options) as store:
            with pytest.raises(StoreError, match="InvalidCertificate"):
                store.head("s3://data/a.bin")
            assert store.stats.retried == 0


def test_why_a_request_was_not_sent_is_in_the_message() -> None:
    told = r"error sending request \(Connection refused\)"
    with StoreClient(retry=AT_ONCE) as store, pytest.raises(StoreError, match=told):
        store.head("http://127.0.0.1:9/a.tar")


def test_a_manifest_that_is_forbidden_is_not_taken_for_one_that_is_missing() -> None:
    with (
        serve(Cloud("s3", dict(OBJECTS), instead={"_manifest.json": (403, {})})) as cloud,
        StoreClient(cloud.options) as store,
        pytest.raises(DataError, match=r"_manifest\.json' is not used: .*403"),
    ):
        load_beside(store.list(cloud.url), store)


@pytest.mark.parametrize("kind", PAGES)
def test_a_manifest_that_is_missing_is_none_on_every_store(kind: str) -> None:
    with serve(Cloud(kind, dict(OBJECTS))) as cloud, StoreClient(cloud.options) as store:
        assert load_beside(store.list(cloud.url), store) is None


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
