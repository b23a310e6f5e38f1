"""When each cache entry is used next: an order's visits under the names of entries."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from pipegraph.order import Order
from pipegraph.order.layout import LayoutLike, block_samples
from pipegraph.order.left import Deal, check_history
from pipegraph.order.visits import NEVER, NOTHING, Visits
from pipegraph.reader.fetcher import local_ranks
from pipegraph.reader.schedule import RankSteps
from pipegraph.storage import Manifest
from pipegraph.storage.entries import place_of

MAX_NAMES: Final = 65_536
"""Blocks of which each one's entry is named; of more, those that are read soonest. What has no name goes first."""

MIN_DRAWN, MAX_DRAWN = 1_024, 65_536
"""Steps that are drawn ahead of orders that permute single samples: enough to meet each block a few times."""


def node_ranks(rank: int, world_size: int) -> range:
    """The ranks of this node, as torchrun sets them; all of them where every rank may be on it."""
    local, ranks = local_ranks()
    if "LOCAL_WORLD_SIZE" not in os.environ:
        local, ranks = rank, world_size
    first = max(0, rank - local)
    return range(first, min(world_size, first + ranks))


def drawn_visits(
    order: Order, layout: LayoutLike, deal: Deal, ranks: Sequence[int], start: int, stop: int
) -> Visits:
    """The visits of the steps start..stop-1, each step its own: exact for every order, at the cost of drawing them."""
    samples = block_samples(layout)
    ends = np.cumsum(samples)
    numbers, steps = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for rank in ranks:
        drawn = order.indices(layout, deal.seed, deal.epoch, rank, deal.world_size, start, stop, deal.history)
        numbers.append(np.searchsorted(ends, drawn, side="right"))
        steps.append(start + np.arange(len(drawn), dtype=np.int64))
    number, step = np.concatenate(numbers), np.concatenate(steps)
    inside = number < len(samples)  # the samplers of torch's C++ front end may run past the end
    return Visits.of(len(samples), (number[inside], step[inside], step[inside]))


class NextUseIndex:
    """The next uses of cache entries, in steps, of the running epoch and the one behind it.

    One thread calls `follow`; `next_use` is thread-safe.
    """

    def __init__(
        self, order: Order, manifest: Manifest, rank: int, world_size: int, place: Callable[[int], str]
    ) -> None:
        self._order, self._manifest, self._place = order, manifest, place
        self._world_size, self._ranks = world_size, node_ranks(rank, world_size)
        self._whole = True  # until the order says that it does not know whole epochs
        drawn = 8 * manifest.blocks // len(self._ranks)
        self._ahead = min(MAX_DRAWN, max(MIN_DRAWN, drawn))
        self._deal: RankSteps | None = None
        self._then = self._now = NOTHING
        self._known_to = self._named_to = 0
        self._places: dict[str, int] = {}
        self._step = 0

    def follow(self, deal: RankSteps, step: int) -> None:
        """Training is at a step of an epoch."""
        if deal is not self._deal:
            self._deal = deal
            self._known_to = self._named_to = -1
            self._then = self._visits(Deal(deal.seed, deal.epoch + 1, self._world_size, ()), 0)
        if self._known_to < 0 or (not self._whole and step > self._known_to - self._ahead // 2):
            # Half of what was drawn is used up.
            self._now = self._visits(
                Deal(deal.seed, deal.epoch, self._world_size, check_history(deal.history)), step
            )
            self._known_to = step + self._ahead
        if step > self._named_to:
            self._give_names(step)
        self._step = step

    def _visits(self, deal: Deal, step: int) -> Visits:
        if self._whole:
            visits = self._order.visits(self._manifest, deal, self._ranks)
            if visits is not None:
                return visits
            self._whole = False
        return drawn_visits(self._order, self._manifest, deal, self._ranks, step, step + self._ahead)

    def _give_names(self, step: int) -> None:
        blocks = self._manifest.blocks
        if blocks <= MAX_NAMES:
            if not self._places:
                self._places = {self._place(number): number for number in range(blocks)}
            self._named_to = NEVER
            return
        soonest = self._now.soonest(step, MAX_NAMES // 4).tolist()
        if len(soonest) < MAX_NAMES // 4:
            soonest += self._then.soonest(0, MAX_NAMES // 4 - len(soonest)).tolist()
        self._places = {self._place(number): number for number in soonest}
        # Asked again when half of these have begun.
        self._named_to = step + self._now.next_use(soonest[len(soonest) // 2], step) if soonest else NEVER

    def next_use(self, name: str) -> float:
        """Steps until the use; infinite for what is not of this dataset, not of this node's ranks, or far ahead."""
        number = self._places.get(place_of(name))
        if number is None or self._deal is None:
            return float("inf")
        steps = self._now.next_use(number, self._step)
        if steps < NEVER:
            return float(steps)
        steps = self._then.next_use(number, 0)
        return float(self._deal.stop - self._step + steps) if steps < NEVER else float("inf")
