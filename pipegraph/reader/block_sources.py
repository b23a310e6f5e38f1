"""Where blocks come from: the blocks of a manifest, or whole parts; from place, memory or the node cache."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

from pipegraph.errors import GraphError, MemoryLimitError, ShardError
from pipegraph.order import LaneOrder, Order
from pipegraph.order.lane_plan import largest_lanes
from pipegraph.reader.columns_filter import Choice, SameFields
from pipegraph.reader.fetcher import Fetcher
from pipegraph.reader.schedule import SHARE
from pipegraph.storage import Manifest, Part, ShardFile
from pipegraph.storage.formats import Block, Format, format_of
from pipegraph.storage.local import LocalParts
from pipegraph.storage.object_file import open_part
from pipegraph.storage.open_blocks import open_block

_log = logging.getLogger("pipegraph")

MANY_REPEATS: Final = 16
"""Blocks decoded a second time in an epoch from which on that is said, and as many as there are blocks."""

ALL: Final = Choice()


class BlockSource(ABC):
    """Blocks by number.

    Attributes:
        fetched: whether blocks are fetched (from a store, through a cache, decoded into memory), not read in place.
        stride: steps after which to look again at what there is room for; so many first ones of a run are its cold
            start.
        beside: bytes of the budget that others take.
    """

    fetched: bool
    stride: int
    beside = 0
    _fetcher: Fetcher

    @abstractmethod
    def held_nbytes(self, number: int) -> int:
        """What a block counts of the budget; an estimate until it is open."""

    def budget(self) -> int:
        """Bytes that all blocks together should not exceed."""
        return max(1, self._fetcher.budget() - self.beside)

    @property
    def in_memory(self) -> bool:
        """Whether the blocks take memory, not only place in the node cache."""
        return self._fetcher.in_memory

    @abstractmethod
    def open(self, number: int, room: Callable[[int], None]) -> tuple[ShardFile | None, Any]:
        """A block's file, if that is still needed, and what is read from it.

        Waits until the block is local; `interrupt` ends the wait.

        Args:
            room: called with the bytes that the block holds, as they grow; what it raises ends the load.

        Raises:
            LoaderClosedError: `interrupt` was called.
        """

    def too_large(self, number: int) -> MemoryLimitError:
        """The error for a block that does not fit the budget even alone."""
        return MemoryLimitError(
            f"{self.name(number)} takes more than {self.budget()} bytes of memory once it is decoded, all that blocks "
            f"may take ({SHARE:.0%} of memory_limit): raise memory_limit, write smaller row groups or parts, or read "
            "fewer columns with Load(columns=...)"
        )

    @abstractmethod
    def name(self, number: int) -> str:
        """A block's name for people."""

    def follow(self, epoch: int) -> None:  # noqa: B027
        """Training has come to this epoch."""

    def interrupt(self) -> None:
        """End every `open` that waits, and those to come."""
        self._fetcher.interrupt()

    def close(self) -> None:
        """Release everything: all files are closed afterwards."""
        self._fetcher.close()


def is_decoded(part: Part) -> bool:
    """Whether blocks of a part are held in memory in a decoded form, wherever their bytes lie."""
    return not format_of(part).in_place


class ManifestSource(BlockSource):
    """The blocks of a manifest; what is read from one is the sequence of its samples."""

    stride = 256

    def __init__(
        self,
        manifest: Manifest,
        order: Order,
        world_size: int,
        fetcher: Fetcher,
        choice: Choice = ALL,
    ) -> None:
        self._manifest, self._order, self._fetcher, self._choice = manifest, order, fetcher, choice
        self._world_size = world_size
        self._local = LocalParts()
        self._decoded = any(map(is_decoded, manifest.parts))
        self.fetched = fetcher.in_use or self._decoded
        self._fields = SameFields(manifest.parts, choice, fetcher.store)
        self._sizes: dict[int, int] = {}  # of blocks that were open, what they held in memory
        self._growth = 1.0  # by how much blocks have grown at most when they were decoded
        # What this epoch has decoded so far. Several threads count: a lost one only moves the message.
        self._epoch, self._loaded, self._repeats, self._has_said = -1, set[int](), 0, False

    def held_nbytes(self, number: int) -> int:
        known = self._sizes.get(number)
        if known is not None:
            return known
        if not self._fetcher.in_use and not is_decoded(self._manifest.parts[self._manifest.block(number)[0]]):
            return 0  # only the places of its samples are held
        return int(self._growth * int(self._manifest.block_nbytes[number]))

    def budget(self) -> int:
        # What is decoded lies in memory, also where the bytes it was made from lie in the cache.
        return self._fetcher.memory if self._decoded else self._fetcher.budget()

    def open(self, number: int, room: Callable[[int], None]) -> tuple[ShardFile | None, Any]:
        part_number, block = self._manifest.block(number)
        part = self._manifest.parts[part_number]
        form = self._choice.form(part)
        file = open_block(
            part,
            block,
            crc32c=self._manifest.block_checksum(number),
            store=self._fetcher.store,
            cache=self._fetcher.cache,
            local=self._local,
        )
        try:
            self._fields.check(part_number, file)
            # Without a cache a remote block's encoded bytes are held beside what is made of them.
            encoded = block.nbytes if self._fetcher.in_use and self._fetcher.in_memory else 0
            if not form.in_place:
                form = form.within(lambda nbytes: room(encoded + nbytes))
            samples: Any = form.read(file, block)
            if len(samples) != block.samples:
                raise ShardError(
                    f"{self.name(number)}: {type(form).__name__}.read gives {len(samples)} samples, the manifest says "
                    f"{block.samples}: the part has changed or is broken; index the parts again"
                )
            self._note_size(number, form, samples, encoded if form.needs_file else 0, block)
        except BaseException as error:
            file.close()
            if isinstance(error, ShardError):
                # What lies behind the last whole block of a broken part is such a block of one; see `build_manifest`.
                is_rest = block.samples == 1 and block.offset + block.nbytes == part.size
                error.uncounted = is_rest and self._manifest.block_checksum(number) is None
            raise
        if form.needs_file:
            return file, samples
        file.close()
        return None, samples

    def _note_size(self, number: int, form: Format, samples: Any, beside: int, block: Block) -> None:
        held = form.held_nbytes(samples, block)
        if not form.in_place:
            self._growth = max(self._growth, (beside + held) / max(1, block.nbytes))
            self._sizes[number] = beside + held
            self._note_repeat(number)
        elif not self._fetcher.in_use:
            self._sizes[number] = held

    def _note_repeat(self, number: int) -> None:
        """Log, once, that blocks are decoded again and again for want of memory, and what helps."""
        if number not in self._loaded:
            self._loaded.add(number)
            return
        self._repeats += 1
        if self._repeats < max(MANY_REPEATS, self._manifest.blocks) or self._has_said:
            return
        self._has_said = True
        remedy, order = "LaneOrder()", self._order
        if isinstance(order, LaneOrder):
            largest = max(list(self._sizes.values()))
            fits = largest_lanes(
                self._manifest.blocks, self._world_size, largest, self._fetcher.memory, order.window
            )
            remedy = f"LaneOrder(lanes={fits})" if fits else "smaller row groups or parts"
        _log.warning(
            "%s and others are decoded again and again: the blocks that samples are read from in turn take more memory "
            "than the %d bytes that blocks may take (%.0f%% of memory_limit). Use %s or a larger memory_limit",
            self.name(number),
            self._fetcher.memory,
            100 * SHARE,
            remedy,
        )

    def follow(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._loaded, self._repeats = epoch, set(), 0

    def name(self, number: int) -> str:
        part, _ = self._manifest.block(number)
        return f"{self._manifest.parts[part].name}, block {number - int(self._manifest.first_block[part])}"


class PartSource(BlockSource):
    """Whole parts, by their place in the list of parts; only their files are used."""

    stride = 1

    def __init__(self, parts: list[Part], whole: bool, fetcher: Fetcher, choice: Choice = ALL) -> None:
        self._fields = SameFields(parts, choice, fetcher.store)
        self._parts, self._fetcher, self._whole = parts, fetcher, whole
        self._local = LocalParts()
        self.fetched = fetcher.in_use and whole
        self._sizes: dict[int, int] = {}  # of parts whose size was asked for

    def held_nbytes(self, number: int) -> int:
        if not self.fetched:
            return 0
        size = self._parts[number].size or self._sizes.get(number)
        # As large as the largest one known, until it is asked for.
        return size if size is not None else max(list(self._sizes.values()), default=0)

    def open(self, number: int, room: Callable[[int], None]) -> tuple[ShardFile | None, Any]:
        file = self._open(number)
        try:
            self._fields.check(number, file)
        except BaseException:
            file.close()
            raise
        return file, None

    def _open(self, number: int) -> ShardFile:
        part, store = self._parts[number], self._fetcher.store
        if not self.fetched:
            return self._local.open(part) if part.is_local else open_part(part, store)
        if part.size is None:
            assert store is not None
            part = store.identify(part)
            self._sizes[number] = part.size or 0
        assert part.size is not None
        if self._fetcher.handle is None and part.size > self._fetcher.budget():
            raise GraphError(
                f"part {part.name!r} has {part.size} bytes, more than this rank may hold in memory "
                f"({self._fetcher.budget()}): give Load(cache=pg.NodeCache(...)), use PartOrder(shuffle=False), which "
                "reads parts as streams, or a manifest, with which parts are read in blocks"
            )
        block = Block(0, part.size, 0, 0)
        return open_block(part, block, store=store, cache=self._fetcher.cache, local=self._local)

    def name(self, number: int) -> str:
        return self._parts[number].name
