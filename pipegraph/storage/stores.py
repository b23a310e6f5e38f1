"""Object stores through obstore: S3-compatible, GCS, Azure, HTTP and memory.

Requests run as tasks of one event loop in one thread per `StoreClient`; callers
wait in their own threads, and `close` ends every wait.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import fnmatch
import importlib
import os
import re
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar, final
from urllib.parse import unquote

from pipegraph.errors import DataError, LoaderClosedError, MissingExtraError, ShardError

from .parts import Part
from .policy import Hedge, Retry, Stall, jitter

T = TypeVar("T")

# Ranges of this size, this many at once: one stream of an object store gives some
# 50 to 100 MB/s, and latency is about a tenth of such a range's time.
RANGE_NBYTES: Final = 8 << 20
PARALLEL: Final = 8

# How often progress is looked at.
_CHUNK_NBYTES: Final = 256 << 10

_memory_stores: dict[str, Any] = {}
_memory_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of an object: size in bytes, and its etag if it has one."""

    size: int
    version: str | None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts of one client: requests sent, tried again, asked twice, found stalled; bytes delivered."""

    requests: int = 0
    retried: int = 0
    hedged: int = 0
    stalled: int = 0
    nbytes: int = 0


class StoreError(DataError, OSError):
    """A store did not give what was asked for, after all tries. Never holds credentials."""


class WritesAt(Protocol):
    def write_at(self, offset: int, data: bytes) -> None: ...


@dataclass
class _Counts:
    requests: int = 0
    retried: int = 0
    hedged: int = 0
    stalled: int = 0
    nbytes: int = 0


@final
class StoreClient:
    """Reads objects by URL. Any thread may call anything.

    After a fork it is an error to use one that was made before (its thread is not there any
    more, nor those of the client library); pickled to another process, it is made anew there.

    Args:
        options: obstore's: of the store (``endpoint``, ``region``, ...), and
            ``client_options`` and ``credential_provider``. What is missing comes from the
            environment (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``), then from the instance's metadata service.
        retry, hedge, grace_s: see `policy`; a `Hedge` belongs to one client.
        range_nbytes, parallel: large reads are cut into ranges of this size, so many at once.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        retry: Retry | None = None,
        hedge: Hedge | None = None,
        grace_s: float = 10.0,
        range_nbytes: int = RANGE_NBYTES,
        parallel: int = PARALLEL,
    ) -> None:
        try:
            self._obstore = importlib.import_module("obstore")
        except ImportError as error:
            raise MissingExtraError("obstore", "cloud", "reading remote shards") from error
        self._options = dict(options or {})
        self._retry, self._grace = retry or Retry(), grace_s
        self.range_nbytes, self.parallel = range_nbytes, parallel
        self._lock = threading.Lock()
        self._stores: dict[str, Any] = {}
        self._counts, self._hedge = _Counts(), hedge or Hedge()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._process = os.getpid()

    def __reduce__(self) -> tuple[object, ...]:
        make = partial(
            StoreClient,
            self._options,
            retry=self._retry,
            grace_s=self._grace,
            range_nbytes=self.range_nbytes,
            parallel=self.parallel,
        )
        return make, ()

    @property
    def stats(self) -> StoreStats:
        with self._lock:
            c = self._counts
            return StoreStats(c.requests, c.retried, c.hedged, c.stalled, c.nbytes)

    def head(self, url: str) -> ObjectInfo:
        """Size and etag of an object.

        Raises:
            StoreError: missing, not allowed, or no answer within the deadline.
            LoaderClosedError: the client was closed.
        """
        store, path = self._store(url)

        async def ask() -> ObjectInfo:
            meta = await asyncio.wait_for(self._obstore.head_async(store, path), self._grace)
            return ObjectInfo(meta["size"], meta["e_tag"])

        return self._result(self._retried(url, 0, ask))

    def list(self, pattern: str) -> list[Part]:
        """The objects below a URL that ends in ``/``, or that match a glob, sorted by name.

        ``*`` and ``?`` do not match ``/``, and a folder's own objects only are listed.

        Raises:
            StoreError: as `head`, or nothing matches.
        """
        root, key = split_url(pattern)
        store, _ = self._store(pattern)
        glob = key + "*" if not key or key.endswith("/") else key
        literal = re.split(r"[*?\[]", glob, maxsplit=1)[0]
        prefix = literal[: literal.rfind("/") + 1]
        wanted = re.compile(_glob_regex(glob))

        async def ask() -> list[Part]:
            found = []
            # Below `prefix` only: the rest of a pattern's folder may be long.
            async for batch in self._obstore.list(store, prefix=prefix or None, chunk_size=1000):
                found += [
                    Part(f"{root}/{m['path']}", m["size"]) for m in batch if wanted.fullmatch(m["path"])
                ]
            return found

        parts = sorted(self._result(self._retried(pattern, 0, ask)), key=lambda p: p.uri)
        if not parts:
            raise StoreError(
                f"parts {safe_url(pattern)!r}: no object matches in {safe_url(root + '/' + prefix)!r}"
            )
        return parts

    def read(self, url: str, offset: int, nbytes: int, *, version: str | None = None) -> bytes:
        """A range of an object; a long one in parallel pieces. Raises as `submit`."""
        if nbytes <= self.range_nbytes:
            return self.submit(url, offset, nbytes, version=version).result()
        data = bytearray(nbytes)

        class Into:
            def write_at(self, at: int, piece: bytes) -> None:
                data[at : at + len(piece)] = piece

        self.download(url, offset, nbytes, Into(), version=version)
        return bytes(data)

    def download(
        self, url: str, offset: int, nbytes: int, sink: WritesAt, *, version: str | None = None
    ) -> None:
        """Read a range in parallel pieces and hand each to `sink`, in this thread.

        At most `parallel` pieces are held. Positions given to the sink count from
        `offset`. Raises as `submit`.
        """
        starts = iter(range(0, nbytes, self.range_nbytes))
        pending: dict[Pending[bytes], int] = {}
        try:
            while True:
                while len(pending) < self.parallel and (start := next(starts, None)) is not None:
                    length = min(self.range_nbytes, nbytes - start)
                    pending[self.submit(url, offset + start, length, version=version)] = start
                if not pending:
                    return
                by_future = {p.future: p for p in pending}
                done = concurrent.futures.wait(by_future, return_when=concurrent.futures.FIRST_COMPLETED).done
                for future in done:
                    piece = by_future[future]
                    sink.write_at(pending.pop(piece), piece.result())
        finally:
            for piece in pending:
                piece.cancel()

    def submit(self, url: str, offset: int, nbytes: int, *, version: str | None = None) -> Pending[bytes]:
        """Begin to read one range; `Pending.result` waits for its bytes.

        A transfer that was cut goes on where it was, one that stalls is begun anew from
        there, and one that is slow is asked for twice.

        Args:
            version: the etag the object must have; without it the first answer's
                must be that of all further ones.

        Raises (from ``result``):
            StoreError: missing, not allowed, changed meanwhile, or no bytes within the deadline.
            ShardError: the object ends before the range does.
            LoaderClosedError: the client was closed.
        """
        store, path = self._store(url)
        if nbytes == 0:
            done: concurrent.futures.Future[bytes] = concurrent.futures.Future()
            done.set_result(b"")
            return Pending(done)
        return Pending(self._start(self._hedged(store, path, url, offset, nbytes, version)))

    def put(self, url: str, data: bytes) -> None:
        """Write a small object, such as a manifest beside its shards."""
        store, path = self._store(url)

        async def ask() -> None:
            limit = self._grace + len(data) / self._retry.min_rate
            await asyncio.wait_for(self._obstore.put_async(store, path, data), limit)

        self._result(self._retried(url, len(data), ask))

    def close(self) -> None:
        """Cancel every request and end the thread. Idempotent."""
        with self._lock:
            self._closed = True
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop and thread:
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop)
            thread.join()

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        with self._lock:  # names of options only: values may be secrets
            return f"<StoreClient {sorted(self._stores)}, options {sorted(self._options)}>"

    # Requests, in the loop's thread.

    async def _hedged(
        self, store: Any, path: str, url: str, offset: int, nbytes: int, version: str | None
    ) -> bytes:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        tasks = {loop.create_task(self._range(store, path, url, offset, nbytes, version))}
        try:
            # Only full ranges: short ones would make their times incomparable.
            after = self._hedge.after() if nbytes == self.range_nbytes else None
            if after is not None:
                done, _ = await asyncio.wait(tasks, timeout=after)
                if not done:
                    self._count(hedged=1)
                    self._hedge.hedged()
                    tasks.add(loop.create_task(self._range(store, path, url, offset, nbytes, version)))
            left = set(tasks)
            while True:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                won = next((t for t in done if t.exception() is None), None)
                if won is None and left:
                    continue
                data = (won or next(iter(done))).result()
                if nbytes == self.range_nbytes:
                    self._hedge.finished(loop.time() - begun)
                self._count(nbytes=len(data))
                return data
        finally:
            for task in tasks:
                task.cancel()

    async def _range(
        self, store: Any, path: str, url: str, offset: int, nbytes: int, version: str | None
    ) -> bytes:
        """One range, over as many connections as it takes."""
        transfer = _Transfer(offset, nbytes, version)
        loop = asyncio.get_running_loop()
        begun, failures = loop.time(), 0
        while len(transfer.data) < nbytes:
            had = len(transfer.data)
            try:
                await self._receive(store, path, url, transfer)
                continue
            except Exception as error:
                failures = 1 if len(transfer.data) > had else failures + 1
                delay = self._delay(error, failures, loop.time() - begun, nbytes)
                if delay is None:
                    got = f" ({len(transfer.data)} of {nbytes} bytes from {offset} came)"
                    raise _plain(error, url, got) from None
            await asyncio.sleep(delay)
        return bytes(transfer.data)

    async def _receive(self, store: Any, path: str, url: str, transfer: _Transfer) -> None:
        """Append what one connection brings."""
        loop = asyncio.get_running_loop()
        stall = Stall(loop.time(), grace_s=self._grace, min_rate=self._retry.min_rate)
        data, start, stop = transfer.data, transfer.offset, transfer.offset + transfer.nbytes
        options: dict[str, Any] = {"range": (start + len(data), stop)}
        # What is continued must be the object that was begun.
        if transfer.version is not None:
            options["if_match"] = transfer.version
        self._count(requests=1)

        async def within(wait: Any) -> Any:
            try:
                return await asyncio.wait_for(wait, stall.remaining(loop.time()))
            except TimeoutError:
                self._count(stalled=1)
                raise _Stalled from None

        answer = await within(self._obstore.get_async(store, path, options=options))
        if answer.meta["size"] < stop:
            raise ShardError(
                f"{safe_url(url)}: bytes {start}..{stop} asked for, but the object has "
                f"{answer.meta['size']}; it is truncated or its index belongs to another object"
            )
        if tuple(answer.range) != options["range"]:
            raise _Unasked
        if transfer.version is None:
            transfer.version = answer.meta["e_tag"]
        chunks = aiter(answer.stream(min_chunk_size=_CHUNK_NBYTES))
        while len(data) < transfer.nbytes:
            try:
                chunk = await within(anext(chunks))
            except StopAsyncIteration:
                raise _Cut from None
            stall.received(loop.time(), len(chunk))
            data += memoryview(chunk)[: transfer.nbytes - len(data)]

    async def _retried(self, url: str, nbytes: int, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        loop = asyncio.get_running_loop()
        begun, failures = loop.time(), 0
        while True:
            try:
                self._count(requests=1)
                return await ask()
            except Exception as error:
                failures += 1
                delay = self._delay(error, failures, loop.time() - begun, nbytes)
                if delay is None:
                    raise _plain(error, url, "") from None
            await asyncio.sleep(delay)

    def _delay(self, error: Exception, failures: int, elapsed_s: float, nbytes: int) -> float | None:
        if not self._is_passing(error):
            return None
        delay = self._retry.delay(failures, elapsed_s, nbytes, jitter())
        if delay is not None:
            self._count(retried=1)
        return delay

    def _is_passing(self, error: Exception) -> bool:
        """Whether the same request may well succeed later: server errors and broken connections."""
        if isinstance(error, _Stalled | _Cut | TimeoutError):
            return True
        if not isinstance(error, self._obstore.exceptions.GenericError | ConnectionError):
            return False
        # The client has one class for a server that is down and for a request that is wrong.
        status = _STATUS.search(str(error))
        asks_again = status is None or status[1] in ("408", "429") or status[1].startswith("5")
        return asks_again and not _METADATA.search(str(error))

    # The thread.

    def _start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        with self._lock:
            if self._closed or self._process != os.getpid():
                work.close()
                if self._closed:
                    raise LoaderClosedError("the store client is closed")
                raise StoreError(
                    "the store client was made before a fork; make one in each process, or use spawn"
                )
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run_loop, args=(self._loop,), name="pipegraph-store-io", daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _result(self, work: Coroutine[Any, Any, T]) -> T:
        return Pending(self._start(work)).result()

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, n in more.items():
                setattr(self._counts, name, getattr(self._counts, name) + n)

    def _store(self, url: str) -> tuple[Any, str]:
        root, key = split_url(url)
        with self._lock:
            store = self._stores.get(root)
            if store is None:
                store = self._stores[root] = self._make_store(root)
        return store, key

    def _make_store(self, root: str) -> Any:
        make = importlib.import_module("obstore.store")
        if root.startswith("memory://"):
            with _memory_lock:  # one per name and process, as files are
                return _memory_stores.setdefault(root, make.MemoryStore())
        options = dict(self._options)
        # Ours are the only tries and time limits: one that resumes, and one that counts bytes.
        client = {"timeout": "1d", "connect_timeout": f"{self._grace}s", **options.pop("client_options", {})}
        if root.startswith("http://") or str(options.get("endpoint", "")).startswith("http://"):
            client.setdefault("allow_http", True)
        try:
            return make.from_url(root, client_options=client, retry_config={"max_retries": 0}, **options)
        except Exception as error:
            raise _plain(error, root, f" (store options given: {sorted(options)})") from None


class Pending(Generic[T]):
    """An answer on its way."""

    def __init__(self, future: concurrent.futures.Future[T]) -> None:
        self.future = future

    def result(self) -> T:
        """Wait for it; an interrupt of the wait cancels the request."""
        try:
            return self.future.result()
        except concurrent.futures.CancelledError:
            raise LoaderClosedError("the store client was closed while a request was under way") from None
        except BaseException:
            self.future.cancel()
            raise

    def cancel(self) -> None:
        self.future.cancel()


@dataclass
class _Transfer:
    offset: int
    nbytes: int
    version: str | None
    data: bytearray = field(default_factory=bytearray)


class _Stalled(Exception):
    """fewer bytes per second than the least rate"""


class _Cut(Exception):
    """the connection ended before its time"""


class _Unasked(Exception):
    """the server answered with another range than the one asked for"""


def split_url(url: str) -> tuple[str, str]:
    """(store, key) of a URL: ``s3://bucket`` and ``a/b.tar``."""
    scheme, _, rest = url.partition("://")
    host, _, key = rest.partition("/")
    if url != _without_query(url) or (scheme in ("http", "https") and "@" in host):
        raise DataError(
            f"part {safe_url(url)!r}: URLs with a query or a password are not supported; "
            "give credentials as store options"
        )
    return f"{scheme}://{host}", unquote(key) if scheme in ("http", "https") else key


def safe_url(url: str) -> str:
    """A URL for messages: without a query, user name or password, which may be secrets."""
    return _USER.sub(r"\1", _without_query(url))


def _without_query(url: str) -> str:
    # Elsewhere than in HTTP a "?" may be part of a name or a pattern.
    http = url.startswith(("http://", "https://"))
    return re.split(r"\?" if http else r"\?[^/]*=", url, maxsplit=1)[0]


_STATUS = re.compile(r"status code: (\d{3})")

# Where clouds keep their machines' credentials: asked last, when none were found before.
_METADATA = re.compile(r"169\.254\.169\.254|metadata\.google\.internal")

_QUERY = re.compile(r"\?[^\s\"'),}\]]*")
_USER = re.compile(r"(https?://)[^/\s\"'@]*@")


def _plain(error: Exception, url: str, more: str) -> Exception:
    """An error for users: what happened, without the client's own debug output and secrets."""
    if isinstance(error, ShardError | DataError):
        return error
    text = str(error) or error.__doc__ or type(error).__name__
    text = text.partition("\n\nDebug source")[0].strip()
    text = _USER.sub(r"\1", _QUERY.sub("?...", text))
    if _METADATA.search(text):
        more += (
            ". No credentials were found: set the cloud's environment variables, give them as store options, or "
            "skip_signature=True for public data"
        )
    return StoreError(f"{safe_url(url)}: {text}{more}")


def _glob_regex(glob: str) -> str:
    """As a shell's: ``*`` and ``?`` stop at ``/``, ``**/`` does not."""
    text = fnmatch.translate(glob.replace("**/", "\0").replace("*", "\1").replace("?", "\2"))
    return text.replace("\0", "(?:.*/)?").replace("\1", "[^/]*").replace("\2", "[^/]")


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _cancel_all() -> None:
    loop = asyncio.get_running_loop()
    tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop.call_soon(loop.stop)
