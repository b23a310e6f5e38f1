"""Blocks of a data set, open for reading, with those that come next loaded ahead.

The caller says which blocks it wants, in which order (a pure function of the order it reads by, and
of `preload`); threads bring them near in that order, as far as there are bytes for them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from pipegraph.errors import LoaderClosedError

from .blocks import open_block
from .cache import NodeCache
from .files import ShardFile
from .formats import format_of
from .formats.base import Sample
from .manifest import Manifest
from .stores import StoreClient

LOADERS: Final = 4


@dataclass(frozen=True, slots=True)
class Loaded:
    """One block was brought near.

    Args:
        number: of the block in its manifest.
        nbytes: of the block.
        seconds: from the start of its load to its end.
        ahead: nobody waited for it when it was done.
    """

    number: int
    nbytes: int
    seconds: float
    ahead: bool


@dataclass
class _Ready:
    file: ShardFile
    samples: Sequence[Sample]


@final
class BlockSupply:
    """The blocks of a manifest for the readers of one process.

    Any thread may call anything. What `samples` gave stays readable as long as it is
    referred to, also after `close`.

    Args:
        manifest: its block numbers are used.
        store: for remote parts; closed by `close`.
        cache: of this node; its waits are ended by `close`.
        hold_nbytes: blocks loaded or loading, together. A block that is waited for is loaded in any case.
        loaders: blocks loaded ahead at the same time.
        loaded: told of each load, in the thread that did it.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        store: StoreClient | None = None,
        cache: NodeCache | None = None,
        hold_nbytes: int = 1 << 30,
        loaders: int = LOADERS,
        loaded: Callable[[Loaded], None] | None = None,
    ) -> None:
        self._manifest, self._store, self._cache = manifest, store, cache
        self._hold, self._loaders, self._tell = hold_nbytes, loaders, loaded
        self._changed = threading.Condition()
        self._wanted: tuple[int, ...] = ()
        self._ready: dict[int, _Ready] = {}
        self._loading: set[int] = set()
        self._waiters: dict[int, int] = {}
        self._failed: dict[int, Exception] = {}
        self._not_ahead: set[int] = set()  # failed since the last `want`
        self._threads: list[threading.Thread] = []
        self._closed = False

    def want(self, numbers: Sequence[int]) -> None:
        """The blocks in use and those that come next, in the order of their use; returns at once.

        Blocks that are not among them are given up.
        """
        with self._changed:
            if self._closed:
                return
            self._wanted = tuple(dict.fromkeys(numbers))
            wanted = set(self._wanted)
            given_up = [self._ready.pop(n) for n in list(self._ready) if n not in wanted]
            # What failed ahead is tried again when it is needed.
            self._failed.clear()
            self._not_ahead.clear()
            while len(self._threads) < min(self._loaders, len(self._wanted)):
                name = f"pipegraph-blocks-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._load_ahead, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify_all()
        del given_up  # closes files that nobody reads, outside the lock

    def samples(self, number: int) -> Sequence[Sample]:
        """The samples of a block; waits for its load, or loads it in this thread if nobody does.

        Raises:
            LoaderClosedError: `close` was called.
            And as `open_block`; the next call tries again.
        """
        with self._changed:
            self._waiters[number] = self._waiters.get(number, 0) + 1
            try:
                self._changed.wait_for(lambda: self._closed or number not in self._loading)
                if self._closed:
                    raise LoaderClosedError("the supply of blocks is closed")
                if ready := self._ready.pop(number, None):
                    self._ready[number] = ready  # used last
                    return ready.samples
                if error := self._failed.pop(number, None):
                    raise error
                self._loading.add(number)
            finally:
                self._waiters[number] -= 1
                if not self._waiters[number]:
                    del self._waiters[number]
        return self._load(number, waited=True).samples

    @property
    def held(self) -> tuple[int, ...]:
        """The blocks that are near now, by number."""
        with self._changed:
            return tuple(sorted(self._ready))

    def wait_for(self, numbers: Sequence[int]) -> None:
        """Wait until these blocks are near, or have failed, or the supply is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or all(n in self._ready or n in self._not_ahead for n in numbers)
            )

    def close(self) -> None:
        """End loads and waits, and join the threads. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads, self._threads = self._threads, []
            given_up, self._ready = self._ready, {}
        given_up.clear()
        if self._store is not None:
            self._store.close()
        if self._cache is not None:
            self._cache.close()
        for thread in threads:
            thread.join()

    def __enter__(self) -> BlockSupply:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        with self._changed:
            return (
                f"<BlockSupply: {len(self._ready)} near, {len(self._loading)} loading, "
                f"{len(self._wanted)} wanted, {self._nbytes()}/{self._hold} bytes>"
            )

    # These run under the lock.

    def _nbytes(self) -> int:
        return sum(int(self._manifest.block_nbytes[n]) for n in (*self._ready, *self._loading))

    def _next(self) -> int | None:
        """The first wanted block that nobody has, if there is room for it."""
        number = next(
            (
                n
                for n in self._wanted
                if n not in self._ready and n not in self._loading and n not in self._not_ahead
            ),
            None,
        )
        if number is None:
            return None
        nbytes = int(self._manifest.block_nbytes[number])
        held = self._nbytes()
        return number if not held or held + nbytes <= self._hold else None

    def _over(self, latest: int) -> list[_Ready]:
        """What has to go after a load: blocks that were only asked for once, those used longest ago first."""
        found = []
        for number in [n for n in self._ready if n not in self._wanted and n != latest]:
            if self._nbytes() <= self._hold:
                break
            found.append(self._ready.pop(number))
        return found

    # These do not.

    def _load_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next() is not None)
                if self._closed:
                    return
                number = self._next()
                assert number is not None
                self._loading.add(number)
            with contextlib.suppress(Exception):  # kept for who asks for the block
                self._load(number, waited=False)

    def _load(self, number: int, *, waited: bool) -> _Ready:
        begun = time.perf_counter()
        given_up: list[_Ready] = []
        ready: _Ready | None = None
        error: Exception | None = None
        try:
            part_number, block = self._manifest.block(number)
            part, crc = self._manifest.parts[part_number], self._manifest.block_checksum(number)
            file = open_block(part, block, crc32c=crc, store=self._store, cache=self._cache)
            ready = _Ready(file, format_of(part).read(file, block))
        except Exception as caught:
            error = caught
            raise
        finally:
            with self._changed:
                self._loading.discard(number)
                if error and not waited:
                    self._failed[number] = error
                    self._not_ahead.add(number)
                waited = waited or number in self._waiters
                if ready and not self._closed and (waited or number in self._wanted):
                    self._ready[number] = ready
                    given_up = self._over(number)
                self._changed.notify_all()
            given_up.clear()
        if self._tell:
            seconds = time.perf_counter() - begun
            self._tell(Loaded(number, int(self._manifest.block_nbytes[number]), seconds, not waited))
        return ready
