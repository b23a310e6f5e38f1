"""Requests to an object store, as coroutines: tried again, resumed after a cut, given up when stalled."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from pipegraph.errors import ShardError

from .retries import (
    Backoff,
    ClosedEarly,
    Stalled,
    WrongRange,
    is_passing,
    jitter,
    plain,
)
from .urls import safe_url
from .versions import ObjectInfo, Versions

T = TypeVar("T")

# A connection that does not deliver so much within the grace is stalled, however long the transfer.
_CHUNK_NBYTES: Final = 256 << 10


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
        self._versions.answered(url, ObjectInfo.of(answer.meta))
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
                if is_passing(error, self._obstore.exceptions.GenericError):
                    delay = self._retry.delay(failures, loop.time() - begun, nbytes, jitter())
                if delay is None:
                    got = "" if data is None else f" ({came} of {nbytes} bytes from {offset} came)"
                    raise plain(error, url, got) from None
            self._count(retried=1)
            await asyncio.sleep(delay)
