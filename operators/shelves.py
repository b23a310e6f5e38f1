"""Where a stage's blocks come from: the blocks of a manifest, or whole parts; from place, memory or the node cache."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Final, final

from pipegraph.errors import GraphError
from pipegraph.operators.foresight import Foresight
from pipegraph.operators.lookahead import Deal
from pipegraph.operators.near import Near
from pipegraph.operators.opening import Opening
from pipegraph.order import LaneOrder, Order
from pipegraph.storage import Cacheable, LocalParts, Manifest, Part, ShardFile, open_block, open_part
from pipegraph.storage.blocks import cacheable
from pipegraph.storage.formats import Block, TokenFormat, format_of
from pipegraph.storage.formats.arrays import NpyFormat
from pipegraph.storage.formats.tar import TarFormat

IN_PLACE: Final = (TarFormat, NpyFormat, TokenFormat)
"""Formats whose samples are read from the file one by one; of others a block's decoded form is held in memory."""

SHARE: Final = 0.5
"""Of ``memory_limit``, what blocks held in memory may take; chunks in flight have the rest."""


class Shelf(ABC):
    """Blocks by number.

    Attributes:
        near: whether blocks are brought near (from a store, or through a cache), or read in place.
        keeps: whether what is let go of stays near, in the node cache.
        stride: steps over which consumption is measured; the first so many of a run are its opening.
        steps_per_switch: about how many steps lie between the first uses of two blocks.
        opening: reads samples of blocks that are not near, where that can be done.
        most_open: blocks that may be held at once, where each holds a file open.
    """

    near: bool
    keeps: bool = False
    stride: int
    steps_per_switch: float
    opening: Opening | None = None
    most_open: float = math.inf

    @abstractmethod
    def held_nbytes(self, number: int) -> int:
        """What a block counts of the budget; an estimate until it is open."""

    @abstractmethod
    def budget(self) -> int:
        """Bytes that all blocks together should not exceed."""

    @abstractmethod
    def open(self, number: int) -> tuple[ShardFile, Any]:
        """A block's file, and what is read from it. Blocks until it is near; `interrupt` ends that.

        Raises:
            LoaderClosedError: `interrupt` was called.
        """

    @abstractmethod
    def name(self, number: int) -> str:
        """A block's name for people."""

    def is_here(self, number: int) -> bool:
        """Whether it lies in the cache already, so that opening it takes no time."""
        return False

    def follow(self, deal: Deal, step: int) -> None:  # noqa: B027
        """Training is near this step of an epoch; called now and then, by one thread."""

    @abstractmethod
    def interrupt(self) -> None:
        """End every `open` that waits, and those to come."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; no file is open any more."""


def is_decoded(part: Part) -> bool:
    """Whether blocks of a part are held in memory in a decoded form, wherever their bytes lie."""
    return not isinstance(format_of(part), IN_PLACE)


@final
class BlockShelf(Shelf):
    """The blocks of a manifest; what is read from one is the sequence of its samples.

    Args:
        pieces: the folder of the blocks' pieces, or None.
    """

    stride = 256

    def __init__(
        self,
        manifest: Manifest,
        order: Order,
        rank: int,
        world_size: int,
        near: Near,
        pieces: str | None = None,
    ) -> None:
        self._manifest, self._order, self._near = manifest, order, near
        self._rank, self._world_size = rank, world_size
        self._local = LocalParts()
        self.near, self.keeps = near.in_use, near.handle is not None
        self.most_open = near.most_open
        readers = 1  # ranks that read the same block
        if isinstance(order, LaneOrder) and order.shuffle:
            readers = world_size // math.gcd(order.lane_count(manifest), world_size)
        self.steps_per_switch = max(1.0, len(manifest) / max(1, manifest.blocks) / readers)
        self._decoded = any(map(is_decoded, manifest.parts))
        self._foresight: Foresight | None = None
        if self.near:
            self.opening = Opening(manifest, pieces, near.store, near.memory // 8)

    def held_nbytes(self, number: int) -> int:
        if not self.near:
            part, _ = self._manifest.block(number)
            if not is_decoded(self._manifest.parts[part]):
                return 0
        return int(self._manifest.block_nbytes[number])

    def budget(self) -> int:
        # What is decoded lies in memory, also where the bytes it was made from lie in the cache.
        return min(self._near.memory, self._near.budget()) if self._decoded else self._near.budget()

    def open(self, number: int) -> tuple[ShardFile, Any]:
        part_number, block = self._manifest.block(number)
        part = self._manifest.parts[part_number]
        file = open_block(
            part,
            block,
            crc32c=self._manifest.block_checksum(number),
            store=self._near.store,
            cache=self._near.cache,
            local=self._local,
        )
        try:
            return file, format_of(part).read(file, block)
        except BaseException:
            file.close()
            raise

    def follow(self, deal: Deal, step: int) -> None:
        """Give the cache the uses that the order foresees, of this epoch and the next."""
        handle = self._near.handle
        if handle is None:
            return
        if self._foresight is None:
            self._foresight = Foresight(
                self._order, self._manifest, self._rank, self._world_size, lambda n: self._cacheable(n).name
            )
            handle.plan(self._foresight.next_use)
        self._foresight.follow(deal, step)

    def name(self, number: int) -> str:
        part, _ = self._manifest.block(number)
        return f"{self._manifest.parts[part].name}, block {number - int(self._manifest.first_block[part])}"

    def is_here(self, number: int) -> bool:
        handle = self._near.handle
        return handle is not None and self._cacheable(number) in handle

    def _cacheable(self, number: int) -> Cacheable:
        part, block = self._manifest.block(number)
        return cacheable(self._manifest.parts[part], block, self._manifest.block_checksum(number))

    def interrupt(self) -> None:
        if self.opening is not None:
            self.opening.cancel()
        self._near.interrupt()

    def close(self) -> None:
        self._near.close()


@final
class PartShelf(Shelf):
    """Whole parts, by their place in the list of parts; only their files are of interest."""

    stride = 1
    steps_per_switch = 1.0

    def __init__(self, parts: list[Part], whole: bool, near: Near) -> None:
        self._parts, self._near, self._whole = parts, near, whole
        self._local = LocalParts()
        self.near = near.in_use and whole
        self.most_open = near.most_open
        self._sizes: dict[int, int] = {}  # of parts whose size was asked for

    def held_nbytes(self, number: int) -> int:
        if not self.near:
            return 0
        size = self._parts[number].size or self._sizes.get(number)
        # As large as the largest one known, until it is asked for.
        return size if size is not None else max(list(self._sizes.values()), default=0)

    def budget(self) -> int:
        return self._near.budget()

    def open(self, number: int) -> tuple[ShardFile, Any]:
        part, store = self._parts[number], self._near.store
        if not self.near:
            return self._local.open(part) if part.is_local else open_part(part, store), None
        if part.size is None:
            assert store is not None
            part = Part(part.uri, store.head(part.uri).size)
            self._sizes[number] = part.size or 0
        assert part.size is not None
        if self._near.handle is None and part.size > self._near.budget():
            raise GraphError(
                f"part {part.name!r} has {part.size} bytes, more than this rank may hold in memory "
                f"({self._near.budget()}): give Load(cache=pg.NodeCache(...)), use PartOrder(shuffle=False), which "
                "reads parts as streams, or a manifest, with which parts are read in blocks"
            )
        block = Block(0, part.size, 0, 0)
        return open_block(part, block, store=store, cache=self._near.cache, local=self._local), None

    def name(self, number: int) -> str:
        return self._parts[number].name

    def interrupt(self) -> None:
        self._near.interrupt()

    def close(self) -> None:
        self._near.close()
