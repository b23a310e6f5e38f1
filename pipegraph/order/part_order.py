"""PartOrder: shuffles the parts, and the samples within each, as clusters do."""

from __future__ import annotations

import dataclasses
from typing import final

import numpy as np

from pipegraph.errors import GraphError, shown
from pipegraph.order.base import (
    TAILS,
    JsonDict,
    Order,
    Tail,
    check_choice,
    check_flags,
    check_rank,
    check_seed,
)
from pipegraph.order.layout import (
    BlockPlaces,
    Int64Array,
    LayoutLike,
    layout_digest,
    part_samples,
    total_samples,
)
from pipegraph.order.left import Deal, Shares, Spans
from pipegraph.order.permutation import BoundedMemo, derived_keys, key64, permute, permute_one

_tables: BoundedMemo[BlockPlaces] = BoundedMemo(16 << 20, lambda table: table.nbytes)
_shares: BoundedMemo[Shares] = BoundedMemo(16 << 20, lambda s: s.spans.low.nbytes * 2 + s.bounds.nbytes)


@final
@dataclasses.dataclass(frozen=True)
class PartOrder(Order):
    """Every rank shuffles the list of parts with the same seed, and takes every W-th part.

    The list is shuffled by ``numpy.random.RandomState(seed).shuffle`` (epoch 0 with a
    seed below 2**32; others by a number hashed from seed and epoch), rank r of W
    takes the parts with index % W == r, and reads them one after the other, the
    samples of a part permuted. Positions number the shuffled parts' samples end to end.

    After a change of the world size, parts not yet begun are split again in the same
    way. The rest of the parts already begun is concatenated, cut into equal pieces,
    and read first.

    Args:
        shuffle: shuffle parts and samples; else they come in their own order.
        tail: if ranks have unequal numbers of samples: ranks with fewer repeat their own
            from the start (``"pad"``), ranks with more stop early (``"drop"``), or each
            reads its own and no more (``"uneven"``).

    Raises:
        GraphError: ``tail`` is none of these.
    """

    in_turn = False
    shuffle: bool = True
    tail: Tail = "pad"

    def __post_init__(self) -> None:
        check_flags(self, "shuffle")
        check_choice("PartOrder: tail", self.tail, TAILS)

    def config(self) -> JsonDict:
        return {"order": "PartOrder"} | dataclasses.asdict(self)

    def parts(
        self, parts: int, seed: int = 0, epoch: int = 0, rank: int = 0, world_size: int = 1
    ) -> Int64Array:
        """The part numbers that a rank reads, in its order, int64; needs no sizes.

        Args:
            parts: how many parts there are.

        Raises:
            GraphError: ``parts`` is negative, or ``rank`` is not within 0..world_size-1.
        """
        check_seed(seed, epoch)
        check_rank(rank, world_size)
        if parts < 0:
            raise GraphError(f"PartOrder: parts must be a number of parts >= 0, got {shown(parts)}")
        return self._order(parts, int(seed), int(epoch))[rank::world_size]

    def within(
        self, part: int, samples: int, seed: int = 0, epoch: int = 0, start: int = 0, stop: int | None = None
    ) -> Int64Array:
        """The samples of one part, numbered from its start, in the order they are read, int64."""
        check_seed(seed, epoch)
        places = np.arange(start, samples if stop is None else min(stop, samples), dtype=np.int64)
        if not self.shuffle:
            return places
        key = derived_keys(key64("part", seed, epoch), np.array([part], dtype=np.int64))
        return permute_one(places, samples, int(key[0]))

    def _length(self, layout: LayoutLike, deal: Deal, rank: int) -> int:
        counts = self._shares(layout, deal).counts
        if self.tail == "pad":
            return int(counts.max())
        return int(counts.min() if self.tail == "drop" else counts[rank])

    def _longest(self, layout: LayoutLike, deal: Deal) -> int:
        counts = self._shares(layout, deal).counts
        return int(counts.min() if self.tail == "drop" else counts.max())

    def _positions(self, layout: LayoutLike, deal: Deal, rank: int, start: int, stop: int) -> Int64Array:
        shares = self._shares(layout, deal)
        step = np.arange(start, stop, dtype=np.int64)
        own = shares.counts
        if not step.size:
            return step
        # A rank without any part pads with the samples of one that has some.
        reader = rank if own[rank] else int(np.flatnonzero(own)[rank % np.count_nonzero(own)])
        again, index = np.divmod(step, own[reader])
        positions = shares.spans.at(shares.bounds[reader] + index)
        padded = step >= own[rank]
        # A multiple of N of its own for each rank and round: no two padded places share a position.
        positions[padded] += (1 + again[padded] * deal.world_size + rank) * total_samples(layout)
        return positions

    def draw(self, layout: LayoutLike, positions: Int64Array, seed: int, epoch: int) -> Int64Array:
        positions = positions % total_samples(layout)
        if not self.shuffle:
            return positions
        table = self._table(layout, seed, epoch)
        block = table.find(positions)
        start = table.starts(block)
        keys = derived_keys(key64("part", seed, epoch), table.order[block])
        return table.samples(start + permute(positions - start, table.ends[block] - start, keys), block)

    def _order(self, parts: int, seed: int, epoch: int) -> Int64Array:
        order = np.arange(parts, dtype=np.int64)
        if self.shuffle:
            exact = epoch == 0 and seed < 2**32
            np.random.RandomState(seed if exact else key64("parts", seed, epoch) % 2**32).shuffle(order)
        return order

    def _table(self, layout: LayoutLike, seed: int, epoch: int) -> BlockPlaces:
        def build() -> BlockPlaces:
            samples = part_samples(layout)
            return BlockPlaces.of(samples, self._order(len(samples), seed, epoch))

        return _tables.get((self.shuffle, layout_digest(layout), seed, epoch), build)

    def _shares(self, layout: LayoutLike, deal: Deal) -> Shares:
        key = (self.shuffle, layout_digest(layout), deal)
        return _shares.get(key, lambda: _dealt(self._table(layout, deal.seed, deal.epoch), deal))


def _dealt(table: BlockPlaces, deal: Deal) -> Shares:
    """Each rank's spans of the shuffled parts' samples, after what the history consumed."""
    starts = table.starts(np.arange(len(table.ends)))
    nothing = Spans(starts[:0], starts[:0])
    begun, whole = nothing, Spans(starts, table.ends)
    for ranks, consumed in deal.history:
        left = _divided(begun, whole, ranks).left_after(consumed)
        by_place = np.argsort(left.low)
        low, high = left.low[by_place], left.high[by_place]
        part = table.find(low)
        untouched = (low == starts[part]) & (high == table.ends[part])
        begun, whole = Spans(low[~untouched], high[~untouched]), Spans(low[untouched], high[untouched])
    return _divided(begun, whole, deal.world_size)


def _divided(begun: Spans, whole: Spans, ranks: int) -> Shares:
    """Begun parts cut into equal pieces, whole ones dealt in turn; each rank's in one run."""
    cuts = np.arange(ranks + 1, dtype=np.int64) * begun.total // ranks
    pieces = begun.cut(cuts[:-1], cuts[1:])
    owner = np.concatenate(
        (
            np.searchsorted(cuts[1:], pieces.ends - (pieces.high - pieces.low), side="right"),
            np.arange(len(whole.low)) % ranks,
        )
    )
    low, high = np.concatenate((pieces.low, whole.low)), np.concatenate((pieces.high, whole.high))
    kept = np.argsort(owner, kind="stable")
    kept = kept[high[kept] > low[kept]]
    bounds = np.zeros(ranks + 1, dtype=np.int64)
    np.add.at(bounds, owner[kept] + 1, (high - low)[kept])
    return Shares(Spans(low[kept], high[kept]), np.cumsum(bounds))
