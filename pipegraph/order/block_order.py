"""``BlockOrder``: the samplers of torch's C++ front end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import final

import numpy as np

from pipegraph.errors import GraphError
from pipegraph.integers import integer
from pipegraph.order.base import JsonDict, Order, Tail, check_flags
from pipegraph.order.layout import Int64Array, LayoutLike, total_samples
from pipegraph.order.left import Deal, Pairs, Shares, Spans
from pipegraph.order.permutation import BoundedMemo, key64, permute_one

_shuffles: BoundedMemo[Int64Array] = BoundedMemo(64 << 20, lambda array: array.nbytes)
_lefts: BoundedMemo[Spans] = BoundedMemo(4 << 20, lambda spans: 2 * spans.low.nbytes + 1_024)


@final
@dataclasses.dataclass(frozen=True)
class BlockOrder(Order):
    """Each rank reads one contiguous block of the epoch's list.

    With ``shuffle=False`` this is the C++ class ``DistributedSequentialSampler``, with
    ``shuffle=True`` ``DistributedRandomSampler``: a list of ``local_count * W`` indices, of
    which rank r takes those from ``r * local_count`` on.

    A sample's position is its own number, at every world size; the extra entries
    that make ranks equal have positions >= N. After a change of the world size, the
    epoch keeps its list, and what remains of it is split among the new ranks.

    Args:
        shuffle: permute the list.
        allow_duplicates: ``local_count`` is ceil(n/W), and the indices wrap modulo n;
            else it is floor(n/W), and up to W - 1 samples are left out: the last ones,
            or with ``shuffle`` others in each epoch.
        compat: with ``shuffle``, the C++ class index for index, as it is built with
            libstdc++: the seed is not used, without duplicates the same tail is left
            out in every epoch, and with W > 2n indices run past the end. It holds
            8 bytes per sample, and takes about a second per million.
        size: read the first ``size`` samples only (the class's ``reset(new_size)``).

    Raises:
        GraphError: ``compat`` without ``shuffle``, or ``size`` is below 0.
    """

    in_turn = False
    shuffle: bool = True
    allow_duplicates: bool = True
    compat: bool = False
    size: int | None = None

    def __post_init__(self) -> None:
        check_flags(self, "shuffle", "allow_duplicates", "compat")
        if self.compat and not self.shuffle:
            raise GraphError(
                "BlockOrder: compat=True needs shuffle=True, got shuffle=False. "
                "Leave compat out: the sequential order equals the C++ class already."
            )
        if self.size is not None:
            size = integer(self.size, "BlockOrder: size", 0, "must be None or an int >= {}")
            object.__setattr__(self, "size", size)

    def config(self) -> JsonDict:
        return {"order": "BlockOrder"} | dataclasses.asdict(self)

    @property
    def tail(self) -> Tail:
        return "pad" if self.allow_duplicates else "drop"

    def _total(self, layout: LayoutLike) -> int:
        total = total_samples(layout)
        if self.size is None:
            return total
        if self.size > total:
            raise GraphError(
                f"BlockOrder: size must be at most the samples there are, {total}, got {self.size}. "
                "Use dataclasses.replace(order, size=...) to reset it."
            )
        return self.size

    def _length(self, layout: LayoutLike, deal: Deal, rank: int) -> int:
        left = self._left_of(self._listed(layout, deal), deal.history)
        return self._local_count(left.total, deal.world_size)

    def _positions(self, layout: LayoutLike, deal: Deal, rank: int, start: int, stop: int) -> Int64Array:
        left = self._left_of(self._listed(layout, deal), deal.history)
        index = np.arange(start, stop, dtype=np.int64) + rank * self._local_count(left.total, deal.world_size)
        positions = self._at_places(layout, deal, left.at(index % left.total) if stop > start else index)
        extra = index >= left.total
        if extra.any():
            # Only after a resize: the first list has a place for each of its extra positions.
            total, listed = self._total(layout), self._listed(layout, deal)
            above = 1 if self.compat else -(-listed // total) + index[extra] // left.total - 1
            positions[extra] = positions[extra] % total + above * total
        return positions

    def draw(self, layout: LayoutLike, positions: Int64Array, seed: int, epoch: int) -> Int64Array:
        total = self._total(layout)
        if self.compat:
            return np.where(positions < total, positions, positions - total)
        return positions % total

    def _local_count(self, places: int, world_size: int) -> int:
        return -(-places // world_size) if self.allow_duplicates else places // world_size

    def _listed(self, layout: LayoutLike, deal: Deal) -> int:
        """The places of the list dealt at the epoch's first world size."""
        ranks = deal.history[0][0] if deal.history else deal.world_size
        return self._local_count(self._total(layout), ranks) * ranks

    def _left_of(self, listed: int, history: Pairs) -> Spans:
        """What is left of the first list; each step of the history is worked out once."""

        def work_out() -> Spans:
            if not history:
                whole = np.array([listed] if listed else [], dtype=np.int64)
                return Spans(np.zeros_like(whole), whole)
            left = self._left_of(listed, history[:-1])
            ranks, consumed = history[-1]
            bounds = np.arange(ranks + 1, dtype=np.int64) * self._local_count(left.total, ranks)
            return Shares(left, np.minimum(bounds, left.total)).left_after(consumed)

        return _lefts.get((self.allow_duplicates, listed, history), work_out)

    def _at_places(self, layout: LayoutLike, deal: Deal, places: Int64Array) -> Int64Array:
        """The positions that the list holds at these places."""
        if not self.shuffle:
            return places
        listed = self._listed(layout, deal)
        if self.compat:
            key = (listed, deal.epoch % 2**32)
            return _shuffles.get(key, lambda: shuffled_by_libstdcxx(*key))[places]
        # Without duplicates all samples are shuffled before the tail is cut: each
        # epoch leaves out others.
        domain = max(listed, self._total(layout))
        return permute_one(places, domain, key64("list", deal.seed, deal.epoch))


_RANGE = 2**32 - 1
# Raw numbers taken from the generator at once.
_DRAWN = 1 << 12


def shuffled_by_libstdcxx(size: int, seed: int) -> Int64Array:
    """0..size-1 as ``std::shuffle`` with ``std::mt19937(seed)`` leaves them, int64 (size,).

    Args:
        seed: 0 <= seed < 2**32.

    Raises:
        GraphError: ``size`` is 2**32 or more; there the algorithm is another one.
    """
    if size > _RANGE:
        raise GraphError(f"BlockOrder: compat=True takes fewer than 2**32 samples, got {size}. Leave it out.")
    raw = _raw(seed)
    order = list(range(size))
    if size and _RANGE // size >= size:
        first = 1
        if size % 2 == 0:
            other = _below(2, raw)
            order[1], order[other] = order[other], order[1]
            first = 2
        for i in range(first, size, 2):
            # One number below (i + 1) * (i + 2) holds both places.
            place, next_place = divmod(_below((i + 1) * (i + 2), raw), i + 2)
            order[i], order[place] = order[place], order[i]
            order[i + 1], order[next_place] = order[next_place], order[i + 1]
    else:
        for i in range(1, size):
            place = _below(i + 1, raw)
            order[i], order[place] = order[place], order[i]
    return np.array(order, dtype=np.int64)


def _below(bound: int, raw: Iterator[int]) -> int:
    product = next(raw) * bound
    low = product & _RANGE
    if low < bound:
        threshold = (_RANGE + 1 - bound) % bound
        while low < threshold:
            product = next(raw) * bound
            low = product & _RANGE
    return product >> 32


def _raw(seed: int) -> Iterator[int]:
    # numpy's RandomState and std::mt19937 seed the same generator alike.
    generator = np.random.RandomState(seed)
    while True:
        yield from np.frombuffer(generator.bytes(4 * _DRAWN), dtype="<u4").tolist()
