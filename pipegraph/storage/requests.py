"""Requests to an object store, as coroutines: tried again, resumed after a cut, given up when stalled; all answers for
an object are of one version of it.
"""

from __future__ import annotations

import asyncio
import errno
import io
import random
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pipegraph import concurrency
from pipegraph.errors import DataError, ShardError, StoreError

from .parts import safe_url

T = TypeVar("T")

# A connection that does not deliver so much within the grace is stalled, however long the transfer.
_CHUNK_NBYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with full jitter, inside a deadline.

    Full jitter (a delay drawn from zero to the bound) spreads the clients that one
    outage hit at once; see Brooker, "Exponential Backoff And Jitter", AWS, 2015.

    Args:
        deadline_s: after this no further try begins, for a transfer without bytes;
            each byte adds its time at `min_rate`.
        first_s, max_s: bound of the first and of any delay.
        min_rate: bytes per second.
    """

    deadline_s: float = 120.0
    first_s: float = 0.1
    max_s: float = 10.0
    min_rate: float = 64_000.0

    def delay(self, failures: int, elapsed_s: float, nbytes: int, draw: float) -> float | None:
        """Seconds to wait before the next try, or None to give up.

        Args:
            failures: so far, at least 1; those before the last progress do not count.
            draw: uniform in [0, 1).
        """
        bound = min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 60))
        delay = draw * bound
        deadline = self.deadline_s + nbytes / self.min_rate
        return delay if elapsed_s + delay < deadline else None


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of an object: its size in bytes, and what identifies its version; None before it was asked."""

    size: int | None = None
    # The etag, without quotes and the mark of weak ones, which stores write in one answer and leave out in the next;
    # where there is none the time of the last change in seconds, else an empty string.
    version: str | None = None

    @staticmethod
    def of(meta: Mapping[str, Any]) -> ObjectInfo:
        """From the client library's description of an object."""
        changed = meta["last_modified"]
        etag = (meta["e_tag"] or "").removeprefix("W/").strip('"')
        # The client's word for a server that names no time is the first second of 1970.
        time = f"{_CHANGED}{changed:%FT%T%z}" if changed is not None and changed.timestamp() else ""
        return ObjectInfo(meta["size"], etag or time)


_CHANGED: Final = "changed "
"""What the versions of objects without an etag begin with."""


class Versions:
    """Bytes of two versions never meet: each answer must be of the version that was expected or answered first.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._known: dict[str, ObjectInfo] = {}

    def of(self, url: str) -> ObjectInfo:
        """As far as it is known."""
        with self._lock:
            return self._known.get(url, ObjectInfo())

    def join(self, url: str, said: ObjectInfo) -> None:
        """A store, or a manifest, has said which object this is."""
        with self._lock:
            known = self._known.get(url, ObjectInfo())
            # Of an etag and a time, one says nothing of the other.
            if (
                said.version
                and known.version
                and said.version != known.version
                and said.version.startswith(_CHANGED) == known.version.startswith(_CHANGED)
            ):
                raise StoreError(
                    f"{safe_url(url)}: the object was replaced while it was in use: its etag, or the time of its last "
                    "change, differs. Index the parts again, and make the graph and its loader anew"
                )
            if said.size is not None and known.size is not None and said.size != known.size:
                raise DataError(
                    f"part {safe_url(url)!r}: has {said.size} bytes, its manifest says {known.size}; it was changed, "
                    "index again"
                )
            size = said.size if known.size is None else known.size
            version = known.version or (known.version if said.version is None else said.version)
            self._known[url] = ObjectInfo(size, version)

    def forget(self, url: str) -> None:
        """It is written anew."""
        with self._lock:
            self._known.pop(url, None)


class Requests:
    """The requests of one client. All of its coroutines run in one event loop."""

    def __init__(
        self,
        obstore: Any,
        retry: Backoff,
        grace_s: float,
        count: Callable[..., None],
        versions: Versions,
    ) -> None:
        self._obstore, self._retry, self._grace, self._count = obstore, retry, grace_s, count
        self._versions = versions

    async def read(self, store: Any, path: str, url: str, offset: int, nbytes: int) -> bytes:
        """One range, over as many connections as it takes."""
        # `getvalue` gives its buffer away without a copy, which at this size would hold the GIL for milliseconds.
        data = io.BytesIO()
        await self.retried(
            url, nbytes, lambda: self._receive(store, path, url, offset, nbytes, data), offset, data
        )
        self._count(nbytes=nbytes)
        return data.getvalue()

    async def _receive(
        self, store: Any, path: str, url: str, offset: int, nbytes: int, data: io.BytesIO
    ) -> None:
        """Append what one connection delivers; behind what an earlier one did."""
        asked = (offset + data.tell(), offset + nbytes)
        answer = await self._in_time(self._obstore.get_async(store, path, options={"range": asked}))
        self._versions.join(url, ObjectInfo.of(answer.meta))
        if answer.meta["size"] < asked[1]:
            raise ShardError(
                f"{safe_url(url)}: bytes {offset}..{asked[1]} asked for, but the object has "
                f"{answer.meta['size']}; it is truncated or its index belongs to another object"
            )
        if tuple(answer.range) != asked:
            raise WrongRange
        chunks = aiter(answer.stream(min_chunk_size=_CHUNK_NBYTES))
        while data.tell() < nbytes:
            chunk = await self._in_time(anext(chunks, None))
            if chunk is None:
                raise ClosedEarly
            data.write(memoryview(chunk)[: nbytes - data.tell()])

    async def _in_time(self, wait: Any) -> Any:
        # Not `asyncio.wait_for`: before Python 3.12 it swallows a cancellation that comes together with the
        # answer, and a client that is closed would continue asking.
        try:
            async with asyncio.timeout(self._grace):
                return await wait
        except TimeoutError:
            self._count(stalled=1)
            raise Stalled from None

    async def retried(
        self,
        url: str,
        nbytes: int,
        ask: Callable[[], Coroutine[Any, Any, T]],
        offset: int = 0,
        data: io.BytesIO | None = None,
    ) -> T:
        """A request that moves `nbytes`, as often as it takes.

        Of a range, what has come of it is in `data`: failures before the last progress do not count.
        """
        loop = asyncio.get_running_loop()
        begun, failures, came = loop.time(), 0, 0
        while True:
            try:
                self._count(requests=1)
                return await ask()
            except Exception as error:
                had, came = came, 0 if data is None else data.tell()
                failures = 1 if came > had else failures + 1
                delay = None
                # Never seeded: ranks that fail together must not draw the same delays.
                if is_passing(error, self._obstore.exceptions.GenericError):
                    delay = self._retry.delay(
                        failures, loop.time() - begun, nbytes, random.SystemRandom().random()
                    )
                if delay is None:
                    got = "" if data is None else f" ({came} of {nbytes} bytes from {offset} came)"
                    raise plain(error, url, got) from None
            self._count(retried=1)
            await asyncio.sleep(delay)


class Stalled(Exception):
    """fewer bytes per second than the least rate"""


class ClosedEarly(Exception):
    """the connection ended before its time"""


class WrongRange(Exception):
    """the server answered with another range than the one asked for"""


_STATUS = re.compile(r"status code: (\d{3})")

# Requests that cannot even be sent, servers that are not who they should be or speak no HTTP, and redirects without an
# end or to nowhere (S3's to another region): they stay so.
_HOPELESS = re.compile(
    r"builder error|InvalidCertificate|InvalidContentType|TooManyRedirects|BareRedirect|hyper::Error\(\s*Parse\("
    r"|status code: 501|Error decoding PROPFIND"  # of servers without WebDAV
)

# What is said beside the client's own words, which name no cause.
_CAUSE = re.compile(r'(?:message|error): "([^"\n]+)"|InvalidCertificate')

# Where clouds keep their machines' credentials: asked last, when none were found before.
_METADATA = re.compile(r"169\.254\.169\.254|metadata\.google\.internal")


def is_passing(error: Exception, generic: type[Exception]) -> bool:
    """Whether the same request may well succeed later: server errors and broken connections."""
    if isinstance(error, Stalled | ClosedEarly | TimeoutError):
        return True
    if not isinstance(error, generic | ConnectionError):
        return False
    # The client has one class for a server that is down and for a request that is wrong (HTTP 400, 416, 429, 503 and
    # a refused connection alike); to leave the tries to it would hide them from the profile and from our time limits.
    status = _STATUS.search(str(error))
    asks_again = status is None or status[1] in ("408", "429") or status[1].startswith("5")
    return asks_again and not _METADATA.search(str(error)) and not _HOPELESS.search(str(error))


def plain(error: Exception, url: str, more: str) -> StoreError | DataError:
    """An error for users: what happened, without the client's own debug output and secrets."""
    if isinstance(error, ShardError | DataError):
        return error
    text, _, details = (str(error) or error.__doc__ or type(error).__name__).partition("\n\nDebug source")
    text = text.strip()
    if "error sending request" in text and (causes := list(_CAUSE.finditer(details))):
        text += f" ({causes[-1][1] or causes[-1][0]})"
    if _METADATA.search(text):
        more += (
            ". No credentials were found: set the cloud's environment variables, give them as store options, or "
            "skip_signature=True for public data"
        )
    found = StoreError(f"{safe_url(url)}: {text}{more}")
    if isinstance(error, FileNotFoundError):
        found.errno = errno.ENOENT
    return found
