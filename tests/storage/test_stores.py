"""Stores: an S3-compatible server, and a proxy that breaks one request in a chosen way."""

import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pipegraph.errors import (
    DataError,
    LoaderClosedError,
    ShardError,
    StoreError,
)
from pipegraph.storage.parts import expand_parts, safe_url, split_url
from pipegraph.storage.requests import Backoff
from pipegraph.storage.stores import StoreClient, answer_of

Connect = Callable[..., StoreClient]

QUICK = Backoff(deadline_s=300, first_s=0.01, max_s=0.05)
DATA = random.Random(0).randbytes(1_000_000)


def once(fault: str, command: str = "GET") -> Callable[[str, str], str]:
    """The first request of this kind gets the fault, all others none."""
    left = iter([fault])
    return lambda method, path: next(left, "") if method == command else ""


class Sink:
    def __init__(self, nbytes: int) -> None:
        self.data, self.pieces = bytearray(nbytes), 0

    def write_at(self, offset: int, data: bytes) -> None:
        self.data[offset : offset + len(data)] = data
        self.pieces += 1


def test_ranges_are_read_exactly(s3_port: int, connect: Connect, url: str) -> None:
    store = connect(s3_port, range_nbytes=10_000, parallel=3)
    assert store.head(url).size == len(DATA)
    for offset, nbytes in ((0, 1), (5, 9999), (12_345, 123_456), (999_999, 1), (0, 0), (0, 1_000_000)):
        assert store.read(url, offset, nbytes) == DATA[offset : offset + nbytes]


def test_a_download_hands_over_pieces_in_the_calling_thread(s3_port: int, connect: Connect, url: str) -> None:
    store, sink = connect(s3_port, range_nbytes=100_000), Sink(850_000)
    store.download(url, 100_000, 850_000, sink.write_at)
    assert sink.data == DATA[100_000:950_000]
    assert sink.pieces == 9


def test_listing_matches_globs_and_folders_with_sizes(s3_port: int, connect: Connect) -> None:
    store = connect(s3_port)
    for name in ("b-2.tar", "b-10.tar", "c.txt", "deep/d.tar"):
        store.put(f"s3://data/listing/{name}", b"x" * len(name))
    assert [(p.name, p.size) for p in expand_parts("s3://data/listing/*.tar", store=store)] == [
        ("b-10.tar", 8),
        ("b-2.tar", 7),
    ]
    assert [p.name for p in store.list("s3://data/listing/")] == ["b-10.tar", "b-2.tar", "c.txt"]
    assert [p.name for p in store.list("s3://data/listing/**/*.tar")] == ["b-10.tar", "b-2.tar", "d.tar"]
    assert [p.name for p in store.list("s3://data/listing/b-?.tar")] == ["b-2.tar"]
    with pytest.raises(StoreError, match=r"no object matches in 's3://data/listing/'"):
        store.list("s3://data/listing/*.zip")


def test_a_missing_object_is_an_error_at_once(s3_port: int, connect: Connect) -> None:
    store = connect(s3_port)
    for ask in (lambda: store.head("s3://data/none"), lambda: store.read("s3://data/none", 0, 5)):
        with pytest.raises(StoreError, match=r"s3://data/none: .*not found"):
            ask()
    assert store.counts["retried"] == 0


def test_a_range_behind_the_end_is_an_error_at_once(s3_port: int, connect: Connect, url: str) -> None:
    store = connect(s3_port)
    with pytest.raises(ShardError, match="the object has 1000000; it is truncated"):
        store.read(url, 999_990, 20)
    assert store.counts["retried"] == 0


def given_up_at_once(store: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first request stalls with is soon given up; what only takes its time, on a busy machine, is not."""
    requests, waits = store._requests, itertools.count()
    in_time = requests._in_time

    async def in_its_time(wait: Any) -> Any:
        # It waits for the answer, then for a part of the half that comes, and then for what never comes.
        requests._grace = 0.1 if next(waits) >= 2 and not store.counts["stalled"] else 600
        return await in_time(wait)

    monkeypatch.setattr(requests, "_in_time", in_its_time)


@pytest.mark.parametrize("fault", ["503", "drop", "cut", "stall"])
def test_a_request_that_fails_once_is_tried_again(
    proxy: Any, connect: Connect, url: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = connect(proxy.port, retry=QUICK, grace_s=600)
    proxy.fault = once(fault)
    if fault == "stall":
        given_up_at_once(store, monkeypatch)
    assert store.read(url, 1000, 900_000) == DATA[1000:901_000]
    assert store.counts["retried"] == 1
    assert store.counts["stalled"] == (fault == "stall")


@pytest.mark.parametrize("fault", ["cut", "stall"])
def test_a_transfer_that_was_cut_resumes_where_it_was(
    proxy: Any, connect: Connect, url: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = connect(proxy.port, retry=QUICK, grace_s=600)
    proxy.fault = once(fault)
    if fault == "stall":
        given_up_at_once(store, monkeypatch)
    assert store.read(url, 0, 1_000_000) == DATA
    first, second = (seen for command, seen, _ in proxy.seen if command == "GET")
    assert first == "bytes=0-999999"
    start = int(second.removeprefix("bytes=").split("-")[0])
    assert 0 < start <= 500_000


def test_what_is_continued_must_be_the_same_object(
    proxy: Any, connect: Connect, url: str, s3_port: int
) -> None:
    store, other = connect(proxy.port, retry=QUICK), connect(s3_port)

    def fault(method: str, path: str) -> str:
        if method == "GET" and len(proxy.seen) == 0:
            return "cut"
        other.put(url, DATA[::-1])
        return ""

    proxy.fault = fault
    with pytest.raises(StoreError, match="the object was replaced while it was in use"):
        store.read(url, 0, 1_000_000)


def test_a_server_that_stays_down_is_an_error(proxy: Any, connect: Connect, url: str) -> None:
    class FiveTimes(Backoff):
        def delay(self, failures: int, elapsed_s: float, nbytes: int, draw: float) -> float | None:
            return None if failures > 5 else 0.0

    store = connect(proxy.port, retry=FiveTimes())
    proxy.fault = lambda method, path: "503"
    with pytest.raises(StoreError, match=r"503.*\(0 of 10 bytes from 5 came\)"):
        store.read(url, 5, 10)
    with pytest.raises(StoreError, match="503"):
        store.head(url)
    assert store.counts["retried"] == 10


@pytest.mark.parametrize(("status", "tries"), [("400", 1), ("416", 1), ("429", 2), ("500", 2), ("503", 2)])
def test_a_request_that_is_wrong_is_not_tried_again(
    proxy: Any, connect: Connect, url: str, status: str, tries: int
) -> None:
    store = connect(proxy.port, retry=QUICK)
    proxy.fault = once(status)
    if tries == 1:
        with pytest.raises(StoreError, match=status):
            store.read(url, 0, 10)
    else:
        assert store.read(url, 0, 10) == DATA[:10]
    assert len([1 for command, _, _ in proxy.seen if command == "GET"]) == tries


def test_close_ends_a_wait_for_a_silent_server(proxy: Any, connect: Connect, url: str) -> None:
    before = set(threading.enumerate())
    store = connect(proxy.port, grace_s=600)
    asked = threading.Event()

    def fault(method: str, path: str) -> str:
        asked.set()
        return "late"

    proxy.fault = fault
    pending = store.submit(url, 0, 10)
    assert asked.wait(60)
    store.close()
    with pytest.raises(LoaderClosedError):
        answer_of(pending)
    with pytest.raises(LoaderClosedError):
        store.head(url)
    assert not [t for t in set(threading.enumerate()) - before if t.name == "pipegraph-store-io"]


def test_secrets_are_in_no_message(proxy: Any, connect: Connect, url: str) -> None:
    store = connect(proxy.port, retry=Backoff(deadline_s=0.05, first_s=0.01, min_rate=1e9))
    proxy.fault = lambda method, path: "503"
    with pytest.raises(StoreError) as caught:
        store.read(url, 0, 10)
    error: BaseException | None = caught.value
    assert error is not None
    assert error.__suppress_context__
    assert "very-secret-key" not in f"{error} {store!r} {store._stores}"
    assert "id-of-the-key" not in f"{error} {store!r} {store._stores}"
    with pytest.raises(StoreError, match="store options given") as caught:
        StoreClient({"very_secret_key": 1, "no_such_option": "secret-value"}).head("s3://b/x")
    assert "secret-value" not in str(caught.value)
    with pytest.raises(StoreError, match="belong into client_options.*'timeout'"):
        StoreClient({"timeout": "5s"}).head("s3://b/x")
    with pytest.raises(DataError, match="give credentials as store options") as query:
        split_url("https://user:hunter2@host/a.tar?signature=hidden")
    assert "hidden" not in str(query.value)
    assert "hunter2" not in str(query.value)
    assert safe_url("https://user:hunter2@host/a.tar?sig=1") == "https://host/a.tar"


def test_an_http_server_s_files_are_read(proxy: Any, connect: Connect, url: str) -> None:
    with StoreClient() as store:
        path = url.removeprefix("s3://")
        assert store.read(f"http://127.0.0.1:{proxy.port}/{path}", 10, 20) == DATA[10:30]


# Remote parts.
