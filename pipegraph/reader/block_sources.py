"""Where blocks come from: the blocks of a manifest, or whole parts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import numpy as np

from pipegraph.errors import GraphError, MemoryLimitError, ShardError
from pipegraph.reader.schedule import SHARE
from pipegraph.storage import Manifest, Part, ShardFile
from pipegraph.storage.block_bytes import BlockBytes
from pipegraph.storage.formats import Block, BlockSamples, Format, format_of
from pipegraph.storage.part_files import identify

Room = Callable[[int], None]


def is_decoded(part: Part) -> bool:
    """Whether blocks of a part are held in memory in a decoded form, wherever their bytes lie."""
    return not format_of(part).in_place


class BlockSource:
    """Blocks by number.

    Attributes:
        fetched: whether blocks are fetched (from a store, through a cache, decoded into memory), not read in place.
        stride: steps after which to look again at what there is room for; so many first ones of a run are its cold
            start.
    """

    fetched: bool
    stride: int

    def __init__(self, parts: Sequence[Part], found: BlockBytes, columns: Sequence[str] | None) -> None:
        self._parts, self._bytes, self._columns = parts, found, columns
        self._decoded = any(map(is_decoded, parts))
        self.fetched = found.fetched or self._decoded
        self._sizes: dict[
            int, int
        ] = {}  # of blocks that were open, where they hold something else than assumed
        self._growth = 1.0  # by how much blocks have grown at most when they were decoded

    def held_nbytes(self, number: int) -> int:
        """What a block counts of the budget; an estimate until it is open."""
        known = self._sizes.get(number)
        if known is not None:
            return known
        return int(self._growth * self._nbytes(number)) if self.fetched else 0

    def budget(self) -> int:
        """Bytes that all blocks together should not exceed."""
        # What is decoded lies in memory, also where the bytes it was made from lie in the cache.
        return self._bytes.memory if self._decoded else self._bytes.budget()

    def open(self, number: int, room: Room) -> tuple[ShardFile | None, Any]:
        """A block's file, if that is still needed, and what is read from it.

        Waits until the block is local; `close` ends the wait.

        Args:
            room: called with the bytes that the block holds, as they grow; what it raises ends the load.

        Raises:
            LoaderClosedError: `close` was called.
        """
        part, block, crc32c = self._find(number)
        form = self._form(part)
        file = self._bytes.open(part, block, crc32c)
        try:
            # Without a cache a remote block's encoded bytes are held beside what is made of them.
            encoded = block.nbytes if self._bytes.fetched and self._bytes.in_memory else 0
            samples = self._read(form, file, block, lambda nbytes: room(encoded + nbytes))
            held = form.held_nbytes(samples, block)
            if not form.in_place:
                held += encoded if form.needs_file else 0
                self._growth = max(self._growth, held / max(1, block.nbytes))
            elif self._bytes.fetched:
                held = block.nbytes
            if held != self.held_nbytes(number):
                self._sizes[number] = held
        except BaseException:
            file.close()
            raise
        if form.needs_file:
            return file, samples
        file.close()
        return None, samples

    def _form(self, part: Part) -> Format:
        """A part's format, reading the chosen columns."""
        form = format_of(part)
        return form if self._columns is None else form.choosing(self._columns)

    def _nbytes(self, number: int) -> int:
        """A block's bytes in its part."""
        raise NotImplementedError

    def _find(self, number: int) -> tuple[Part, Block, int | None]:
        """The part that a block lies in, the block, and its checksum if that is known."""
        raise NotImplementedError

    def _read(self, form: Format, file: ShardFile, block: Block, room: Room) -> Any:
        """The samples of a block."""
        raise NotImplementedError

    def too_large(self, number: int) -> MemoryLimitError:
        """The error for a block that does not fit the budget even alone."""
        return MemoryLimitError(
            f"{self.name(number)} takes more than {self.budget()} bytes of memory once it is decoded, all that blocks "
            f"may take ({SHARE:.0%} of memory_limit): raise memory_limit, write smaller row groups or parts, read "
            "fewer columns with Load(columns=...), or give whole parts a manifest= or PartOrder(shuffle=False)"
        )

    def name(self, number: int) -> str:
        """A block's name for people."""
        raise NotImplementedError

    def close(self) -> None:
        """End every `open` that waits, and those to come. Idempotent."""
        self._bytes.close()


@final
class ManifestSource(BlockSource):
    """The blocks of a manifest; what is read from one is the sequence of its samples."""

    stride = 256

    def __init__(self, manifest: Manifest, found: BlockBytes, columns: Sequence[str] | None = None) -> None:
        super().__init__(manifest.parts, found, columns)
        self._manifest = manifest

    def _nbytes(self, number: int) -> int:
        return int(self._manifest.block_nbytes[number])

    def _find(self, number: int) -> tuple[Part, Block, int | None]:
        part, block = self._manifest.block(number)
        return self._parts[part], block, self._manifest.block_checksum(number)

    def _read(self, form: Format, file: ShardFile, block: Block, room: Room) -> Any:
        samples = form.within(room).read(file, block)
        if len(samples) != block.samples:
            raise ShardError(
                f"{file.name}, byte {block.offset}: {type(form).__name__}.read gives {len(samples)} samples, the "
                f"manifest says {block.samples}: the part has changed or is broken; index the parts again"
            )
        return samples

    def name(self, number: int) -> str:
        part, _ = self._manifest.block(number)
        return f"{self._parts[part].name}, block {number - int(self._manifest.first_block[part])}"


@final
class PartSource(BlockSource):
    """Whole parts, by their place in the list of parts.

    What is read from one is the sequence of its samples; of a stream, a function that gives an iterator over them.
    """

    stride = 1

    def __init__(
        self, parts: Sequence[Part], stream: bool, found: BlockBytes, columns: Sequence[str] | None = None
    ) -> None:
        super().__init__(parts, found, columns)
        self._stream, self._decoded = stream, self._decoded and not stream
        self.fetched = self.fetched and (found.cache is not None or not stream)

    def _nbytes(self, number: int) -> int:
        # As large as the largest one known, until the store is asked for it.
        size = self._parts[number].size
        return size if size is not None else max(list(self._sizes.values()), default=0)

    def _find(self, number: int) -> tuple[Part, Block, int | None]:
        part, budget = self._parts[number], self._bytes.budget()
        if part.size is None:
            part = identify(part, self._bytes.store)
        assert part.size is not None
        if self._bytes.fetched and self._bytes.cache is None and part.size > budget:
            raise GraphError(
                f"part {part.name!r} has {part.size} bytes, more than this rank may hold in memory "
                f"({budget}): give Load(cache=pg.NodeCache(...)), use PartOrder(shuffle=False), which "
                "reads parts as streams, or a manifest, with which parts are read in blocks"
            )
        return part, Block(0, part.size, 0, 0), None

    def open(self, number: int, room: Room) -> tuple[ShardFile | None, Any]:
        if not self._stream:
            return super().open(number, room)
        part = self._parts[number]
        if self.fetched:
            part, block, _ = self._find(number)
            file = self._bytes.open(part, block)
        else:
            file = self._bytes.part(part)
        return file, partial(self._form(part).samples, file)

    def _read(self, form: Format, file: ShardFile, block: Block, room: Room) -> Any:
        return _WholePart(form, file, room)

    def name(self, number: int) -> str:
        return self._parts[number].name


class _WholePart(BlockSamples[Any]):
    """The samples of all blocks of a part."""

    def __init__(self, form: Format, file: ShardFile, room: Room) -> None:
        self.nbytes = 0
        self._blocks: list[Any] = []
        self._ends: list[int] = []
        for block in form.index(file):
            before = self.nbytes
            rows = form.within(lambda nbytes: room(before + nbytes)).read(file, block)  # noqa: B023  called here
            self.nbytes += form.held_nbytes(rows, block)
            self._blocks.append(rows)
            self._ends.append(len(self) + len(rows))
            self.at_once = getattr(rows, "at_once", 1)  # a user's format may give any sequence

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def sample(self, index: int) -> Any:
        number = bisect_right(self._ends, index)
        return self._blocks[number][index - self._ends[number]]

    def rows(self, indices: Any) -> list[Any]:
        if self.at_once == 1:
            return super().rows(indices)
        numbers = np.searchsorted(self._ends, indices, "right")
        found: dict[int, Any] = {}
        for number in np.unique(numbers).tolist():
            places, rows = np.flatnonzero(numbers == number), self._blocks[number]
            within = indices[places] - (self._ends[number] - len(rows))
            found.update(zip(places.tolist(), rows.rows(within), strict=True))
        return [found[place] for place in range(len(indices))]
