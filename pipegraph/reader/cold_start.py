"""The first samples of a run, read by ranges, so that the first batch does not wait for whole blocks.

At the start, and after a resume, nothing is near, and a rank reads from as many blocks as it has lanes. While the
opening lasts, loads of whole blocks are held back, and workers fetch the pieces that hold their samples; then the
blocks come, and those of the opening are read by pieces until they are there. What is fetched twice is bounded by a
share of each block. A piece is checked by its own checksum; where anything is wrong with it, the block is loaded,
which knows how to go on.
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
from pipegraph.storage.pieces import Piece, PieceFolder, Pieces, fixed_pieces
from pipegraph.storage.stores import Pending, safe_url

T = TypeVar("T")

TWICE: Final = 4
"""At most one byte in so many of a block is fetched by pieces, and then again with the block."""

KEPT_NBYTES: Final = 32 << 20
"""Pieces that are kept for the next sample in them."""

EDGE_NBYTES: Final = 1 << 17
"""Reads outside a piece up to this size are headers and footers, which every piece of the part needs again."""

FEW: Final = 64
"""Parts whose headers and footers are kept."""


HELD_BACK: Final = 8
"""Whole blocks are held back until one byte in so many of those that the first samples lie in came by ranges."""


@final
class FirstBlocks:
    """The blocks that the first samples of a run lie in, while they are not near. The caller holds a lock.

    Attributes:
        hold_back: whether loads of whole blocks are to wait, so that the first samples have the line for themselves.
    """

    def __init__(self, opening: Opening | None) -> None:
        self._opening = opening
        self.restart()

    def restart(self) -> None:
        """Another run begins."""
        self._numbers: set[int] = set()
        self._nbytes = 0
        self.hold_back = self._opening is not None

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
        """It is near, or cannot be had."""
        self._numbers.discard(number)

    def has_ended(self, goes_on: bool) -> bool:
        """Whether the time of holding back ends now: with the run's first steps, or when enough came by ranges."""
        assert self._opening is not None
        if not self.hold_back or (goes_on and self._opening.nbytes * HELD_BACK < self._nbytes):
            return False
        self.hold_back = False
        return True

    def waits_for(self, nbytes: int) -> bool:
        """A block of this size must come whole: whether all the others shall come too, unless it is a small one."""
        return nbytes * max(1, len(self._numbers)) * TWICE > self._nbytes and self.has_ended(goes_on=False)


@final
class Opening:
    """Reads samples of blocks that are not near. Any thread may call anything.

    Args:
        folder: of the pieces that ``pipegraph index`` wrote, or None. Without it blocks of rows of one size and
            those of Parquet are read by pieces, if the manifest has no checksums that would go unchecked then.
        store: for remote parts.
        most_nbytes: bound of what is kept here.
    """

    def __init__(
        self, manifest: Manifest, folder: str | None, store: StoreClient | None, most_nbytes: int
    ) -> None:
        self._manifest, self._store = manifest, store
        self._folder = PieceFolder(folder, manifest, store) if folder is not None else None
        self._most = min(KEPT_NBYTES, most_nbytes)
        self._lock = threading.Lock()
        self._pieces: dict[int, Pieces | None] = {}
        self._spent: dict[int, int] = {}
        self._kept: OrderedDict[tuple[int, int], _Shared] = OrderedDict()
        self._parts: OrderedDict[int, _Ranges] = OrderedDict()
        self._under_way: set[Pending[Any]] = set()
        self._cancelled = False
        self.nbytes = 0

    def read(self, number: int, index: int) -> Any:
        """Sample ``index`` of a block; None where it must be read from the whole block."""
        try:
            pieces = self._pieces_of(number)
            if pieces is None:
                return None
            which, piece = pieces.of(index)
            shared = self._share(number, which, piece)
            if shared is None:
                return None
            _, block = self._manifest.block(number)
            samples = shared.get(lambda: self._fetch(number, piece))
            return dict(samples[block.first + index - piece.block.first])
        except (DataError, OSError, LoaderClosedError):
            return None  # the block is loaded and says what is wrong, or is broken off as well

    def _pieces_of(self, number: int) -> Pieces | None:
        with self._lock:
            if number in self._pieces:
                return self._pieces[number]
        found = self._look_up(number)
        with self._lock:
            return self._pieces.setdefault(number, found)

    def _look_up(self, number: int) -> Pieces | None:
        written = self._folder.of(number) if self._folder is not None else None
        if written is not None:
            return written
        if self._manifest.block_checksum(number) is not None:
            return None
        part_number, block = self._manifest.block(number)
        form = format_of(self._manifest.parts[part_number])
        if not isinstance(form, ParquetFormat):
            return fixed_pieces(form, block)
        groups = form.index(self._part(part_number), 1)
        stop = block.first + block.samples
        found = tuple(Piece(group, None) for group in groups if block.first <= group.first < stop)
        return (
            Pieces(found) if len(found) > 1 and sum(p.block.samples for p in found) == block.samples else None
        )

    def _share(self, number: int, which: int, piece: Piece) -> _Shared | None:
        """The piece, which is fetched once for all its samples; None where too much of its block was."""
        key, nbytes = (number, which), piece.block.nbytes
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            before = self._spent.get(number, 0)
            spent, whole = before + nbytes, int(self._manifest.block_nbytes[number])
            # The first one may be up to half of the block.
            most = whole // TWICE if before else whole // 2
            if self._cancelled or spent > most or nbytes > self._most:
                return None
            self._spent[number] = spent
            self.nbytes += nbytes
            shared = self._kept[key] = _Shared(nbytes)
            while sum(kept.nbytes for kept in self._kept.values()) > self._most:
                self._kept.popitem(last=False)
            return shared

    def _fetch(self, number: int, piece: Piece) -> Sequence[Any]:
        part_number, _ = self._manifest.block(number)
        part, block = self._manifest.parts[part_number], piece.block
        base = self._part(part_number)
        data = base.read_at(block.offset, block.nbytes)
        if piece.crc32c is not None and crc32c_extend()(0, data) != piece.crc32c:
            raise ShardError(f"{base.name}: a piece at byte {block.offset} differs from its checksum")
        near = _Overlay(base, block.offset, data)
        samples: Sequence[Any] = format_of(part).read(near, block)
        return samples

    def _part(self, number: int) -> _Ranges:
        with self._lock:
            if number in self._parts:
                self._parts.move_to_end(number)
                return self._parts[number]
            part = self._parts[number] = _Ranges(self, self._manifest.parts[number])
            if len(self._parts) > FEW:
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
        """Another run begins: pieces may be fetched again; what blocks had of their share is forgotten."""
        with self._lock:
            self._cancelled = False
            self.nbytes = 0
            self._spent.clear()

    def end(self) -> None:
        """The blocks are there: forget the pieces."""
        with self._lock:
            self._pieces.clear()
            self._kept.clear()
            self._parts.clear()


@final
class _Shared:
    """What several workers want and one fetches; a fetch that fails is tried by the next who asks."""

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
    """A part of which exactly what is asked for is fetched; headers and footers once."""

    def __init__(self, opening: Opening, part: Part) -> None:
        assert part.size is not None
        self.name, self.size = safe_url(part.uri), part.size
        self._opening, self._part = opening, part
        self._edges: dict[tuple[int, int], bytes] = {}

    def stream_nbytes(self) -> int:
        return 1 << 12

    def read_at(self, offset: int, nbytes: int) -> bytes:
        self.check_range(offset, nbytes)
        if not nbytes:
            return b""
        data = self._edges.get((offset, nbytes))
        if data is None:
            data = self._opening.range(self._part, offset, nbytes)
            if nbytes <= EDGE_NBYTES and (offset == 0 or offset + nbytes >= self.size - 8):
                self._edges[offset, nbytes] = data
        return data

    def close(self) -> None:
        pass


@final
class _Overlay(ShardFile):
    """A part with one piece at hand; reads beside it, of headers and footers, are short."""

    def __init__(self, base: _Ranges, offset: int, data: bytes) -> None:
        self.name, self.size = base.name, base.size
        self._file, self._base = OverlayFile(base, offset, BytesFile(data, base.name)), base

    def stream_nbytes(self) -> int:
        return self._base.stream_nbytes()

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return self._file.read_at(offset, nbytes)

    def close(self) -> None:
        pass
