"""Where training is and what it reads next, decided without threads or clocks."""

import numpy as np
import pytest

from pipegraph.reader.schedule import AHEAD, DRAWN_AT_ONCE, Itinerary
from pipegraph.reader.uses import Deal, Pace, Uses


def deal(blocks: list[int], epoch: int = 0, start: int = 0) -> Deal:
    array = np.array(blocks)
    return Deal(epoch, 0, start, len(blocks), lambda first, last: array[first:last])


def look(way: Itinerary, there: set[int] | None = None) -> None:
    """Draw until enough is known."""
    while (draw := way.next_draw(None, None)) is not None:
        uses = Uses.of(draw.deal.blocks(draw.first, draw.last), draw.base + draw.first)
        way.merge(uses, draw.base + draw.last, there or set())


def test_blocks_come_by_their_first_use_across_epochs() -> None:
    way = Itinerary(stride=256, now=0.0)
    way.add(deal([5, 5, 2, 5, 2, 9], start=1))
    way.add(deal([7, 2, 8], epoch=1))
    look(way)
    assert list(way.upcoming) == [(1, 5), (2, 2), (5, 9), (6, 7), (8, 8)]


def test_a_block_is_needed_up_to_its_last_known_use() -> None:
    way, pace = Itinerary(stride=256, now=0.0), Pace()
    way.add(deal([1, 2, 1, 2, 3, 3]))
    look(way)
    assert way.needs(1)
    assert not way.needs(4)
    way.reached(0, 3, 1.0, 0.0, pace)
    assert not way.needs(1)
    assert way.needs(2)


def test_what_is_there_or_asked_for_already_is_not_upcoming() -> None:
    way, pace = Itinerary(stride=256, now=0.0), Pace()
    way.add(deal([1, 2, 3, 4]))
    look(way, there={2})
    way.reached(0, 0, 1.0, 0.0, pace)
    assert way.next_upcoming({2}) == (2, 3)
    assert way.next_upcoming({2, 3}) == (3, 4)


def test_the_pace_leaves_out_the_time_spent_waiting_for_blocks() -> None:
    way, pace = Itinerary(stride=10, now=0.0), Pace()
    way.add(deal([0] * 100))
    assert not way.reached(0, 5, 1.0, 0.0, pace)
    assert way.reached(0, 10, 25.0, 5.0, pace)
    assert pace.mean == pytest.approx(2.0)
    assert way.reached(0, 20, 30.0, 5.0, pace)
    assert pace.mean == pytest.approx((2.0 + 0.5) / 2)


def test_steps_of_other_epochs_and_earlier_ones_change_nothing() -> None:
    way, pace = Itinerary(stride=1, now=0.0), Pace()
    way.add(deal([0] * 10))
    assert way.reached(0, 4, 1.0, 0.0, pace)
    assert not way.reached(0, 2, 2.0, 0.0, pace)
    assert not way.reached(7, 9, 3.0, 0.0, pace)
    assert way.tick == 4
    place = way.place()
    assert place is not None
    assert place[1] == 4


def test_it_looks_no_further_than_what_may_matter() -> None:
    way = Itinerary(stride=256, now=0.0)
    way.add(deal([0] * (3 * AHEAD)))
    look(way)
    assert AHEAD <= way.scanned <= AHEAD + DRAWN_AT_ONCE
    assert way.next_draw(1e-3, 2 * AHEAD * 1e-3) is not None  # loads take so long that more matters
    way = Itinerary(stride=256, now=0.0)
    way.add(deal(list(range(3 * AHEAD))))
    look(way)
    assert way.scanned == DRAWN_AT_ONCE
