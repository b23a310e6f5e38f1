"""Object stores through obstore: S3-compatible, GCS, Azure, HTTP and memory; others by their `Store`.

Requests run as tasks of one event loop in one thread per `StoreClient`; callers
wait in their own threads, and `close` ends every wait.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import importlib
import os
import re
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar, final

from pipegraph import concurrency
from pipegraph.errors import LoaderClosedError, PipegraphError, ShardError, StoreError, extra_module
from pipegraph.event_loop import LoopThread
from pipegraph.forks import lock_free_after_fork, use_native_threads
from pipegraph.stopping import Closing

from .parts import Part, endpoints, glob_regex, safe_url as safe_url, split_url
from .requests import Backoff, ObjectInfo, Requests, Versions, plain

OBSTORE: Final = frozenset(
    "s3 s3a gs az adl azure abfs abfss http https memory file".split()  # of the extra `cloud`
)


class Store(Protocol):
    """Objects by URL. Several threads call it; a `ConnectionError` or a `TimeoutError` is tried again."""

    def read(self, path: str, start: int, stop: int) -> bytes:
        """The bytes start..stop of an object; all of them."""

    def size(self, path: str) -> int:
        """Of an object, in bytes; raises FileNotFoundError where there is none."""

    def list(self, path: str) -> Iterable[str]:
        """The URLs of all objects below a folder's URL, which ends in a slash, in its subfolders too."""


OpenStore = Callable[[str, dict[str, Any]], Store]
"""Opens the store at a root such as ``hdfs://host``, with the options of ``ShardSelect(store=...)``."""

_lock = lock_free_after_fork()
_stores: dict[str, OpenStore] = {}


def register_store(scheme: str, open: OpenStore) -> None:
    """In this process, read URLs of a scheme, such as ``"hdfs"``, through the `Store` of ``open(root, options)``.

    A scheme that is neither registered nor one of obstore's is read through fsspec.
    """
    with _lock:
        _stores[scheme] = open


@final
class FsspecStore:
    """A filesystem of fsspec's: ``hf://``, ``hdfs://``, ``ftp://``, ``github://`` and many others."""

    def __init__(self, root: str, options: dict[str, Any]) -> None:
        core = extra_module("fsspec.core", "fsspec", f"reading {root.partition('://')[0]}:// URLs", "fsspec")
        self._files, _ = core.url_to_fs(root, **options)

    def read(self, path: str, start: int, stop: int) -> bytes:
        data: bytes = self._files.cat_file(self._files._strip_protocol(path), start=start, end=stop)
        return data

    def size(self, path: str) -> int:
        return int(self._files.size(self._files._strip_protocol(path)))

    def list(self, path: str) -> Iterable[str]:
        folder = self._files._strip_protocol(path).rstrip("/")
        return [f"{path}{found[len(folder) :].lstrip('/')}" for found in self._files.find(folder)]


T = TypeVar("T")
Request = concurrent.futures.Future
"""A request under way."""

# Ranges of this size, this many at once: one stream of an object store gives some
# 50 to 100 MB/s, and latency is about a tenth of such a range's time.
RANGE_NBYTES: Final = 8 << 20
PARALLEL: Final = 8

_memory_stores: dict[str, Any] = {}


@final
class StoreClient(Closing):
    """Reads objects by URL. Thread-safe.

    After a fork it is an error to use one that was made before (its thread is not there any
    more, nor those of the client library).

    Args:
        options: obstore's: of the store (``endpoint``, ``region``, ...), and
            ``client_options`` and ``credential_provider``. What is missing comes from the
            environment (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``), then from the instance's metadata service.
        retry, grace_s: tries, and how long a connection may deliver nothing.
        range_nbytes, parallel: large reads are cut into ranges of this size, ``parallel`` at once.
        on_count: called with a name of ``counts`` and how much is added to it, by any thread.

    Attributes:
        counts: ``requests`` sent, ``retried``, ``stalled``; ``nbytes`` delivered.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        retry: Backoff | None = None,
        grace_s: float = 10.0,
        range_nbytes: int = RANGE_NBYTES,
        parallel: int = PARALLEL,
        on_count: Callable[[str, int], None] = lambda name, more: None,
    ) -> None:
        self._obstore = extra_module("obstore", "cloud", "reading remote shards")
        self._options = dict(options or {})
        self._retry, self._grace = retry or Backoff(), grace_s
        self.range_nbytes, self.parallel = range_nbytes, parallel
        self._lock = concurrency.Lock()
        self._stores: dict[str, Any] = {}
        self.counts, self._on_count = collections.Counter[str](), on_count
        self._versions = Versions()
        self._requests = Requests(self._obstore, self._retry, grace_s, self._count, self._versions)
        self._loop: LoopThread | None = None
        self._closed = False
        self._process = os.getpid()

    def head(self, url: str) -> ObjectInfo:
        """Size and version of an object.

        Raises:
            StoreError: missing, not allowed, or no answer within the deadline.
            LoaderClosedError: the client was closed.
        """
        store, path = self._store(url)

        async def ask() -> ObjectInfo:
            if isinstance(store, OtherStore):
                return ObjectInfo(await store.size(url), "")
            async with asyncio.timeout(self._grace):
                meta = await self._obstore.head_async(store, path)
            return ObjectInfo.of(meta)

        info = self._result(self._requests.retried(url, 0, ask))
        self._versions.join(url, info)
        return info

    def expect(self, part: Part) -> None:
        """From now on every answer must be of the part's size and version, as far as known, else it is a DataError."""
        self._versions.join(part.uri, ObjectInfo(part.size, part.version))

    def identify(self, part: Part) -> Part:
        """The part with size and version; asks the store where it has not said them yet. Raises as `head`."""
        self.expect(part)
        known = self._versions.of(part.uri)
        if known.size is None or known.version is None:
            self.head(part.uri)
            known = self._versions.of(part.uri)
        return replace(part, size=known.size, version=known.version)

    def list(self, pattern: str, beside: Collection[str] = ()) -> list[Part]:
        """The objects below a URL that ends in ``/``, or that match a glob, sorted by name.

        ``*`` and ``?`` do not match ``/``, and a folder's own objects only are listed.

        Args:
            beside: names of objects that are listed too, in every folder that is searched.

        Raises:
            StoreError: as `head`, or nothing matches.
        """
        root, key = split_url(pattern)
        store = self._make_store(root, for_listing=True)
        glob = key + "*" if not key or key.endswith("/") else key
        literal = re.split(r"[*?\[]", glob, maxsplit=1)[0]
        prefix = literal[: literal.rfind("/") + 1]
        wanted = re.compile(glob_regex(glob))

        async def ask() -> list[Part]:
            if isinstance(store, OtherStore):
                return [Part(url) for url in await store.list(f"{root}/{prefix}")]
            found: list[Part] = []
            # Below `prefix` only: the rest of a pattern's folder may be long.
            batches = aiter(self._obstore.list(store, prefix=prefix or None, chunk_size=1000))
            while True:
                async with asyncio.timeout(self._grace):
                    batch = await anext(batches, None)
                if batch is None:
                    return found
                found += [Part(f"{root}/{m['path']}", m["size"], ObjectInfo.of(m).version) for m in batch]

        listed = self._result(self._requests.retried(pattern, 0, ask))
        found = (p for p in listed if p.name in beside or wanted.fullmatch(p.uri[len(root) + 1 :]))
        parts = sorted(found, key=lambda p: p.uri)
        if all(part.name in beside for part in parts):
            raise StoreError(
                f"parts {safe_url(pattern)!r}: no object matches in {safe_url(root + '/' + prefix)!r}"
            )
        return parts

    def read(self, url: str, offset: int, nbytes: int) -> bytes:
        """A range of an object; a long one in parallel pieces. Raises as `submit`."""
        pieces: dict[int, bytes] = {}
        self.download(url, offset, nbytes, pieces.__setitem__)
        return b"".join(pieces[at] for at in sorted(pieces))

    def download(self, url: str, offset: int, nbytes: int, write: Callable[[int, bytes], None]) -> None:
        """Read a range in parallel pieces, given to `write` in this thread. Raises as `submit`."""
        starts = iter(range(0, nbytes, self.range_nbytes))
        pending: dict[Request[bytes], int] = {}
        try:
            while True:
                while len(pending) < self.parallel and (start := next(starts, None)) is not None:
                    length = min(self.range_nbytes, nbytes - start)
                    pending[self.submit(url, offset + start, length)] = start
                if not pending:
                    return
                for piece in concurrent.futures.wait(pending, None, concurrent.futures.FIRST_COMPLETED).done:
                    write(pending.pop(piece), answer_of(piece))
        finally:
            for piece in pending:
                piece.cancel()

    def submit(self, url: str, offset: int, nbytes: int) -> Request[bytes]:
        """Begin to read one range; `answer_of` waits for its bytes.

        A transfer that was cut resumes where it was, and one that stalls is begun anew from there. All bytes of an
        object that a client reads are of one version: the expected one, or that of its first answer.

        Raises (from `answer_of`):
            StoreError: missing, not allowed, changed meanwhile, or no bytes within the deadline.
            ShardError: the object ends before the range does.
            LoaderClosedError: the client was closed.
        """
        store, path = self._store(url)
        if isinstance(store, OtherStore):
            return self._start(self._read_other(store, url, offset, nbytes))
        return self._start(self._requests.read(store, path, url, offset, nbytes))

    async def _read_other(self, store: OtherStore, url: str, offset: int, nbytes: int) -> bytes:
        data = await self._requests.retried(url, nbytes, lambda: store.read(url, offset, nbytes))
        self._count(nbytes=nbytes)
        return data

    def put(self, url: str, data: bytes) -> None:
        """Write a small object, such as a manifest beside its shards."""
        store, path = self._store(url)
        if isinstance(store, OtherStore):
            raise StoreError(f"{safe_url(url)}: such a store is only read; write the file by other means")
        self._versions.forget(url)

        async def ask() -> None:
            limit = self._grace + len(data) / self._retry.min_rate
            async with asyncio.timeout(limit):
                await self._obstore.put_async(store, path, data)

        self._result(self._requests.retried(url, len(data), ask))

    def interrupt(self) -> None:
        """End every wait with `LoaderClosedError`, and those to come; waits for nothing itself. Idempotent."""
        with self._lock:
            loop, ended, self._closed = self._loop, self._closed, True
        if loop is not None and not ended:
            loop.end()

    def close(self) -> None:
        """Cancel every request and end the thread. Idempotent."""
        self.interrupt()
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.join()

    def __repr__(self) -> str:
        with self._lock:  # names of options only: values may be secrets
            return f"<StoreClient {sorted(self._stores)}, options {sorted(self._options)}>"

    # The thread.

    def _start(self, work: Coroutine[Any, Any, T]) -> Request[T]:
        with self._lock:
            if self._closed or self._process != os.getpid():
                work.close()
                if self._closed:
                    raise LoaderClosedError("the store client is closed")
                raise StoreError(
                    "the store client was made before a fork; make one in each process, or use spawn"
                )
            if self._loop is None:
                self._loop = LoopThread("pipegraph-store-io")
            return self._loop.submit(work)

    def _result(self, work: Coroutine[Any, Any, T]) -> T:
        return answer_of(self._start(work))

    def _count(self, **more: int) -> None:
        with self._lock:
            self.counts.update(more)
        for name, count in more.items():
            self._on_count(name, count)

    def _store(self, url: str) -> tuple[Any, str]:
        root, key = split_url(url)
        with self._lock:
            store = self._stores.get(root)
            if store is None:
                store = self._stores[root] = self._make_store(root)
        return store, key

    def _make_store(self, root: str, *, for_listing: bool = False) -> Any:
        scheme = root.partition("://")[0]
        with _lock:
            opener = _stores.get(scheme) or (None if scheme.lower() in OBSTORE else FsspecStore)
        if opener is not None:
            try:
                return OtherStore(opener(root, dict(self._options)))
            except PipegraphError:  # fsspec is not installed
                raise
            except Exception as error:
                raise plain(error, root, f" (store options given: {sorted(self._options)})") from None
        if not use_native_threads():
            raise StoreError(
                "a process that has read a store was forked, and obstore's threads are not in the child, so that no "
                "request would end: start it with spawn or forkserver"
            )
        make = importlib.import_module("obstore.store")
        if root.startswith("memory://"):
            with _lock:  # one per name and process, as files are
                return _memory_stores.setdefault(root, make.MemoryStore())
        options = dict(self._options)
        # Ours are the only tries and time limits: one that resumes, and one that counts bytes.
        grace = f"{self._grace * 1000:.0f}ms"  # whole numbers: obstore reads fractions from 0.9 on only
        client = {"timeout": "1d", "connect_timeout": grace, **options.pop("client_options", {})}
        if for_listing:
            # A listing that is given up drops its connection outside of the library's threads, and to put it back
            # into a pool panics there: without a pool it is closed.
            client["pool_max_idle_per_host"] = "0"
        if any(url.lower().startswith("http://") for url in [root, *endpoints(options)]):
            client.setdefault("allow_http", True)
        try:
            return make.from_url(root, client_options=client, retry_config={"max_retries": 0}, **options)
        except BaseException as error:
            if type(error).__name__ == "PanicException":  # obstore's, for one as timeout="5s"
                error = TypeError("options of the connection belong into client_options={...}")
            if not isinstance(error, Exception):
                raise
            raise plain(error, root, f" (store options given: {sorted(options)})") from None


class OtherStore:
    """A `Store` for the client's event loop: each call in a thread, which a `close` does not wait for."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def size(self, url: str) -> int:
        return await asyncio.to_thread(self._store.size, url)

    async def list(self, url: str) -> Sequence[str]:
        return await asyncio.to_thread(lambda: [*self._store.list(url)])

    async def read(self, url: str, offset: int, nbytes: int) -> bytes:
        data = await asyncio.to_thread(self._store.read, url, offset, offset + nbytes)
        if len(data) != nbytes:
            raise ShardError(
                f"{safe_url(url)}: bytes {offset}..{offset + nbytes} asked for, {len(data)} came; it is truncated or "
                "its index belongs to another object"
            )
        return data


def answer_of(request: Request[T]) -> T:
    """Wait for an answer; an interrupt of the wait cancels the request."""
    try:
        return request.result()
    except concurrent.futures.CancelledError:
        raise LoaderClosedError("the store client was closed while a request was under way") from None
    except BaseException:
        request.cancel()
        raise
