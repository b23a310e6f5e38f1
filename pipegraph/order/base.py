"""The interface of every order, and its shared checks."""

from __future__ import annotations

import abc
import operator
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, final

import numpy as np

from pipegraph.errors import GraphError, StateError, shown
from pipegraph.integers import flag
from pipegraph.order.layout import Int64Array, LayoutLike, total_samples
from pipegraph.order.left import Deal, check_history, left_of, steps_begun

History: TypeAlias = Sequence[tuple[int, Any]]
"""Pairs (world size, samples per rank) already consumed in the epoch, oldest first. Where ranks consumed
differently, the second is a sequence with an entry for each (see ``left.Taken``)."""

JsonDict: TypeAlias = dict[str, str | int | bool | None]

Tail: TypeAlias = Literal["pad", "drop", "uneven"]
TAILS: tuple[Tail, ...] = ("pad", "drop", "uneven")

V = TypeVar("V", bound=str)


def check_flags(order: Order, *names: str) -> None:
    """Make these fields of a new order bools; raises GraphError for what is none."""
    for name in names:
        object.__setattr__(order, name, flag(getattr(order, name), f"{type(order).__name__}: {name}"))


class Order(abc.ABC):
    """A pure function from a rank's step to a sample: which one, in which epoch.

    An order is a frozen value. It numbers an epoch of N samples by *positions*:
    position k < N is one sample, the same at every world size, and a position
    k >= N is a padded place that repeats the data of position k mod N. A rank's
    epoch is a sequence of positions (``positions``); what lies at a position is
    ``samples_at``; ``indices`` is the one after the other.

    An order of your own needs ``draw`` and ``config``: its positions are one stream, of
    which rank r of W takes numbers r, r+W, r+2W ... of what is left of the epoch.

    Every method is vectorised, and thread-safe. Steps count from the
    end of ``history``, for all of ``start``, ``stop`` and ``length``.

    Parameters that all methods share:
        layout: a number of samples, the samples per part (sequence or int64
            array), or a manifest.
        seed: 0 <= seed < 2**64, the graph's seed.
        epoch: >= 0, the pass's number.
        rank, world_size: 0 <= rank < world_size.
        start, stop: the rank's steps ``start..stop`` (``stop=None``: to the end);
            a stop beyond the end means the end, as in a slice.
        history: pairs (world size, samples per rank) already consumed in this
            epoch, oldest first.
    """

    __slots__ = ()

    in_turn: ClassVar[bool] = True
    """Whether positions are dealt out to the ranks in turn, rather than in runs."""

    @property
    def tail(self) -> Tail:
        """What becomes of positions that do not fill a step on every rank: ``"pad"``, ``"drop"`` or ``"uneven"``."""
        return "pad"

    @final
    def indices(
        self,
        layout: LayoutLike,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
        stop: int | None = None,
        history: History = (),
    ) -> Int64Array:
        """The samples of this rank's steps, int64 (steps,), numbered through all parts.

        Raises:
            GraphError: an argument is out of its range.
            StateError: ``history`` consumed more than the epoch has.
        """
        positions = self.positions(layout, seed, epoch, rank, world_size, start, stop, history)
        return self.samples_at(layout, positions, seed, epoch)

    @final
    def positions(
        self,
        layout: LayoutLike,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
        stop: int | None = None,
        history: History = (),
    ) -> Int64Array:
        """The global positions of this rank's steps, int64 (steps,); padded ones are >= N.

        Raises: as ``indices``.
        """
        check_seed(seed, epoch)
        length = self.length(layout, world_size, history, rank, seed, epoch)
        last = length if stop is None else operator.index(stop)
        if operator.index(start) < 0 or last < 0:
            raise GraphError(
                f"start and stop must be >= 0, got {start!r} and {stop!r}. They count steps of the rank."
            )
        last = min(last, length)
        deal = Deal(int(seed), int(epoch), world_size, check_history(history))
        return self._positions(layout, deal, rank, min(start, last), last)

    @final
    def length(
        self,
        layout: LayoutLike,
        world_size: int = 1,
        history: History = (),
        rank: int = 0,
        seed: int = 0,
        epoch: int = 0,
    ) -> int:
        """The steps that are left to this rank; equal on all ranks unless ``tail="uneven"``.

        ``seed`` and ``epoch`` matter to ``PartOrder`` alone, where parts differ in size.

        Raises: as ``indices``.
        """
        check_seed(seed, epoch)
        check_rank(rank, world_size)
        pairs = check_history(history)
        for i, (ranks, consumed) in enumerate(pairs):
            longest = self._longest(layout, Deal(int(seed), int(epoch), ranks, pairs[:i]))
            begun = steps_begun(consumed)
            if begun > longest:
                raise StateError(
                    f"{self!r}: history[{i}] says that each of {ranks} ranks consumed {begun} samples, "
                    f"but the epoch had only {longest} left for a rank. "
                    "The state belongs to other data or another order."
                )
        return self._length(layout, Deal(int(seed), int(epoch), world_size, pairs), rank)

    @final
    def samples_at(
        self, layout: LayoutLike, positions: Int64Array | Sequence[int] | int, seed: int = 0, epoch: int = 0
    ) -> Int64Array:
        """The samples at global positions (any, also padded ones), int64 of the same shape.

        Args:
            positions: an array, a number, or a sequence of numbers.

        Raises:
            GraphError: ``positions`` are no integers, the layout has no samples, or a seed or epoch is negative.
        """
        check_seed(seed, epoch)
        found = np.asarray(positions)
        if found.dtype.kind not in "iu" and found.size:
            raise GraphError(
                f"{self!r}: positions must be whole numbers (an array, a list or one), got {shown(positions)}"
            )
        found = found.astype(np.int64, copy=False)
        if not self._total(layout):
            if found.size:
                raise GraphError(f"{self!r}: position {found.flat[0]} of a layout without samples")
            return found.copy()
        return self.draw(layout, found, int(seed), int(epoch))

    @abc.abstractmethod
    def config(self) -> JsonDict:
        """The parameters that fix the order, JSON serialisable, for the graph's digest."""

    @abc.abstractmethod
    def draw(self, layout: LayoutLike, positions: Int64Array, seed: int, epoch: int) -> Int64Array:
        """The samples at these positions >= 0 (k >= N as k mod N), int64, a new array; the layout has samples."""

    def _positions(self, layout: LayoutLike, deal: Deal, rank: int, start: int, stop: int) -> Int64Array:
        """Positions of steps start..stop, which lie inside the rank's length: here rank r of W takes numbers r, r+W,
        r+2W ... of those that are left of one stream, so that a resume at any world size continues it.
        """
        return left_of(deal.history).at(np.arange(start, stop, dtype=np.int64) * deal.world_size + rank)

    def _length(self, layout: LayoutLike, deal: Deal, rank: int) -> int:
        left = left_of(deal.history).count(self._total(layout))
        if self.tail == "pad":
            return -(-left // deal.world_size)
        if self.tail == "drop":
            return left // deal.world_size
        return max(0, -(-(left - rank) // deal.world_size))

    def _longest(self, layout: LayoutLike, deal: Deal) -> int:
        """The steps left to the rank that has most of them."""
        return self._length(layout, deal, 0)

    def _total(self, layout: LayoutLike) -> int:
        """N, the samples of an epoch."""
        return total_samples(layout)


def check_seed(seed: int, epoch: int) -> None:
    """Raise unless 0 <= seed < 2**64 and epoch >= 0."""
    if not 0 <= operator.index(seed) < 2**64:
        raise GraphError(
            f"seed must be an integer of 0..2**64-1, got {shown(seed)}. Pass Graph(..., seed=7)."
        )
    if operator.index(epoch) < 0:
        raise GraphError(f"epoch must be >= 0, got {epoch!r}. The first pass is epoch 0.")


def check_rank(rank: int, world_size: int) -> None:
    """Raise unless 0 <= rank < world_size."""
    if operator.index(world_size) < 1:
        raise GraphError(f"world_size must be >= 1, got {world_size!r}. Pass the number of ranks.")
    if not 0 <= operator.index(rank) < world_size:
        raise GraphError(f"rank must be of 0..{world_size - 1}, got {rank!r}. Ranks count from 0.")


def check_choice(name: str, value: V, choices: tuple[V, ...]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise GraphError(f"{name} must be one of {', '.join(map(repr, choices))}, got {shown(value)}")
