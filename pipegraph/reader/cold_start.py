"""The first samples of a run, read by ranges, so that the first batch does not wait for whole blocks.

At the start, and after a resume, no block is local, and a rank reads from as many blocks as it has lanes. During the
cold start, loads of whole blocks are held back, and workers fetch the sub-blocks that hold their samples; then the
blocks are loaded, and the first ones are read by sub-blocks until they are ready. What is fetched twice is bounded by a
share of each block. A sub-block has a checksum of its own; if anything is wrong with it, the whole block is loaded,
which retries and reports errors.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, TypeVar, final

from pipegraph.errors import DataError, LoaderClosedError, ShardError
from pipegraph.storage import BytesFile, Manifest, OverlayFile, Part, ShardFile, StoreClient, open_part
from pipegraph.storage.checksum import crc32c_extend
from pipegraph.storage.formats import format_of
from pipegraph.storage.formats.parquet import ParquetFormat
from pipegraph.storage.stores import Pending, safe_url
from pipegraph.storage.sub_blocks import SubBlock, SubBlockFolder, SubBlocks, fixed_sub_blocks

T = TypeVar("T")

TWICE: Final = 4
"""At most one byte in so many of a block is fetched by sub-blocks, and then again with the block."""

KEPT_NBYTES: Final = 32 << 20
"""Sub-blocks that are kept for the next sample in them."""

EDGE_NBYTES: Final = 1 << 17
"""Reads outside a sub-block up to this size are headers and footers, which every sub-block of the part needs again."""

MAX_PARTS: Final = 64
"""Parts whose headers and footers are kept."""


HELD_BACK: Final = 8
"""Whole blocks are held back until one byte in so many of those that the first samples lie in came by ranges."""


@final
class FirstBlocks:
    """The blocks that the first samples of a run lie in, while they are not local. The caller holds a lock.

    Attributes:
        hold_back: whether loads of whole blocks are to wait, so that the first samples get all the bandwidth.
    """

    def __init__(self, cold_start: ColdStart | None) -> None:
        self._cold_start = cold_start
        self.restart()

    def restart(self) -> None:
        """Another run begins."""
        self._numbers: set[int] = set()
        self._nbytes = 0
        self.hold_back = self._cold_start is not None

    def __contains__(self, number: int) -> bool:
        return number in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: int, nbytes: int) -> None:
        """One of the first samples lies in this block."""
        if number not in self._numbers:
            self._numbers.add(number)
            self._nbytes += nbytes

    def discard(self, number: int) -> None:
        """It is local, or cannot be loaded."""
        self._numbers.discard(number)

    def has_ended(self, continues: bool) -> bool:
        """Whether the time of holding back ends now: with the run's first steps, or when enough came by ranges."""
        assert self._cold_start is not None
        if not self.hold_back or (continues and self._cold_start.nbytes * HELD_BACK < self._nbytes):
            return False
        self.hold_back = False
        return True

    def waits_for(self, nbytes: int) -> bool:
        """Whether a block of this size, which must be loaded whole, ends the holding back of the others too."""
        return nbytes * max(1, len(self._numbers)) * TWICE > self._nbytes and self.has_ended(continues=False)


@final
class ColdStart:
    """Reads samples of blocks that are not local yet. Thread-safe.

    Args:
        folder: of the sub-blocks that ``pipegraph index`` wrote, or None. Without it blocks of rows of one size and
            those of Parquet are read by sub-blocks, if the manifest has no checksums that would go unchecked then.
        store: for remote parts.
        max_nbytes: bound of what is kept here.
    """

    def __init__(
        self, manifest: Manifest, folder: str | None, store: StoreClient | None, max_nbytes: int
    ) -> None:
        self._manifest, self._store = manifest, store
        self._folder = SubBlockFolder(folder, manifest, store) if folder is not None else None
        self._max_nbytes = min(KEPT_NBYTES, max_nbytes)
        self._lock = threading.Lock()
        self._sub_blocks: dict[int, SubBlocks | None] = {}
        self._spent: dict[int, int] = {}
        self._kept: OrderedDict[tuple[int, int], _Shared] = OrderedDict()
        self._parts: OrderedDict[int, _Ranges] = OrderedDict()
        self._under_way: set[Pending[Any]] = set()
        self._cancelled = False
        self.nbytes = 0

    def read(self, number: int, index: int) -> Any:
        """Sample ``index`` of a block; None where it must be read from the whole block."""
        try:
            sub_blocks = self._sub_blocks_of(number)
            if sub_blocks is None:
                return None
            which, sub_block = sub_blocks.of(index)
            shared = self._share(number, which, sub_block)
            if shared is None:
                return None
            _, block = self._manifest.block(number)
            samples = shared.get(lambda: self._fetch(number, sub_block))
            return dict(samples[block.first + index - sub_block.block.first])
        except (DataError, OSError, LoaderClosedError):
            return None  # loading the whole block reports the error, or is interrupted as well

    def _sub_blocks_of(self, number: int) -> SubBlocks | None:
        with self._lock:
            if number in self._sub_blocks:
                return self._sub_blocks[number]
        found = self._look_up(number)
        with self._lock:
            return self._sub_blocks.setdefault(number, found)

    def _look_up(self, number: int) -> SubBlocks | None:
        written = self._folder.of(number) if self._folder is not None else None
        if written is not None:
            return written
        if self._manifest.block_checksum(number) is not None:
            return None
        part_number, block = self._manifest.block(number)
        form = format_of(self._manifest.parts[part_number])
        if not isinstance(form, ParquetFormat):
            return fixed_sub_blocks(form, block)
        groups = form.index(self._part(part_number), 1)
        stop = block.first + block.samples
        found = tuple(SubBlock(group, None) for group in groups if block.first <= group.first < stop)
        return (
            SubBlocks(found)
            if len(found) > 1 and sum(p.block.samples for p in found) == block.samples
            else None
        )

    def _share(self, number: int, which: int, sub_block: SubBlock) -> _Shared | None:
        """The sub-block, fetched once for all its samples; None if too much of its block was fetched already."""
        key, nbytes = (number, which), sub_block.block.nbytes
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            before = self._spent.get(number, 0)
            spent, whole = before + nbytes, int(self._manifest.block_nbytes[number])
            # The first one may be up to half of the block.
            most = whole // TWICE if before else whole // 2
            if self._cancelled or spent > most or nbytes > self._max_nbytes:
                return None
            self._spent[number] = spent
            self.nbytes += nbytes
            shared = self._kept[key] = _Shared(nbytes)
            while sum(kept.nbytes for kept in self._kept.values()) > self._max_nbytes:
                self._kept.popitem(last=False)
            return shared

    def _fetch(self, number: int, sub_block: SubBlock) -> Sequence[Any]:
        part_number, _ = self._manifest.block(number)
        part, block = self._manifest.parts[part_number], sub_block.block
        base = self._part(part_number)
        data = base.read_at(block.offset, block.nbytes)
        if sub_block.crc32c is not None and crc32c_extend()(0, data) != sub_block.crc32c:
            raise ShardError(f"{base.name}: a sub-block at byte {block.offset} differs from its checksum")
        overlay = _Overlay(base, block.offset, data)
        samples: Sequence[Any] = format_of(part).read(overlay, block)
        return samples

    def _part(self, number: int) -> _Ranges:
        with self._lock:
            if number in self._parts:
                self._parts.move_to_end(number)
                return self._parts[number]
            part = self._parts[number] = _Ranges(self, self._manifest.parts[number])
            if len(self._parts) > MAX_PARTS:
                self._parts.popitem(last=False)
            return part

    def range(self, part: Part, offset: int, nbytes: int) -> bytes:
        """Bytes of a part; `cancel` ends the wait for a remote one."""
        if part.is_local:
            with open_part(part) as file:
                return file.read_at(offset, nbytes)
        assert self._store is not None
        self._store.expect(part)
        return self._within(self._store.submit(part.uri, offset, nbytes))

    def identify(self, part: Part) -> None:
        """Ask the store for a remote part's version, unless it is known; `cancel` ends the wait.

        Raises:
            LoaderClosedError: `cancel` was called.
        """
        if self._store is not None and not part.is_local and not self._store.knows(part.uri):
            self._within(self._store.submit_head(part.uri))

    def _within(self, pending: Pending[T]) -> T:
        with self._lock:
            self._under_way.add(pending)
            cancelled = self._cancelled
        if cancelled:
            pending.cancel()
        try:
            return pending.result()
        finally:
            with self._lock:
                self._under_way.discard(pending)

    def cancel(self) -> None:
        """End every fetch, and those to come."""
        with self._lock:
            self._cancelled = True
            pending = list(self._under_way)
        for one in pending:
            one.cancel()

    def begin(self) -> None:
        """Another run begins: sub-blocks may be fetched again, and the shares used up are reset."""
        with self._lock:
            self._cancelled = False
            self.nbytes = 0
            self._spent.clear()

    def end(self) -> None:
        """The blocks are loaded: forget the sub-blocks."""
        with self._lock:
            self._sub_blocks.clear()
            self._kept.clear()
            self._parts.clear()


@final
class _Shared:
    """Samples that several workers need and one fetches; after a failure the next worker tries again."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._samples: Sequence[Any] | None = None

    def get(self, fetch: Any) -> Sequence[Any]:
        with self._lock:
            if self._samples is None:
                self._samples = fetch()
            return self._samples


@final
class _Ranges(ShardFile):
    """A part of which exactly the requested ranges are fetched; headers and footers once."""

    def __init__(self, cold_start: ColdStart, part: Part) -> None:
        assert part.size is not None
        self.name, self.size = safe_url(part.uri), part.size
        self._cold_start, self._part = cold_start, part
        self._edges: dict[tuple[int, int], bytes] = {}

    def stream_nbytes(self) -> int:
        return 1 << 12

    def read_at(self, offset: int, nbytes: int) -> bytes:
        self.check_range(offset, nbytes)
        if not nbytes:
            return b""
        data = self._edges.get((offset, nbytes))
        if data is None:
            data = self._cold_start.range(self._part, offset, nbytes)
            if nbytes <= EDGE_NBYTES and (offset == 0 or offset + nbytes >= self.size - 8):
                self._edges[offset, nbytes] = data
        return data

    def close(self) -> None:
        pass


@final
class _Overlay(ShardFile):
    """A part with one sub-block in memory; reads beside it, of headers and footers, are short."""

    def __init__(self, base: _Ranges, offset: int, data: bytes) -> None:
        self.name, self.size = base.name, base.size
        self._file, self._base = OverlayFile(base, offset, BytesFile(data, base.name)), base

    def stream_nbytes(self) -> int:
        return self._base.stream_nbytes()

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return self._file.read_at(offset, nbytes)

    def close(self) -> None:
        pass
