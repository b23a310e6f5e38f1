"""The pure reorder buffer."""

import itertools

from hypothesis import given, strategies as st

from pipegraph.engine.reorder import ReorderBuffer


def test_items_wait_for_every_lower_lane():
    buffer = ReorderBuffer()
    assert buffer.add(1, "b") == []
    assert buffer.add(0, "a") == ["a", "b"]
    assert buffer.next == 2


def test_the_next_lane_lets_items_through_while_it_is_open():
    buffer = ReorderBuffer()
    assert buffer.add(0, "a", last=False) == ["a"]
    assert buffer.add(1, "c") == []
    assert buffer.add(0, "b", last=False) == ["b"]
    assert buffer.close(0) == ["c"]


def test_a_closed_lane_without_items_is_passed_over():
    buffer = ReorderBuffer()
    assert buffer.close(1) == []
    assert buffer.add(2, "c") == []
    assert buffer.close(0) == ["c"]
    assert buffer.next == 3


def test_an_open_lane_stops_the_line_even_if_it_holds_items():
    buffer = ReorderBuffer()
    buffer.add(1, "b", last=False)
    assert buffer.close(0) == ["b"]
    assert buffer.add(2, "c") == []
    assert buffer.add(1, "b2") == ["b2", "c"]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.randoms())
def test_every_arrival_order_leaves_lane_by_lane(counts, random):
    lanes = {lane: [(lane, i) for i in range(count)] for lane, count in enumerate(counts)}
    buffer, left = ReorderBuffer(), []
    waiting = [lane for lane, items in lanes.items() for _ in range(len(items) + 1)]
    random.shuffle(waiting)
    sent = dict.fromkeys(lanes, 0)
    for lane in waiting:
        if sent[lane] < len(lanes[lane]):
            left += buffer.add(lane, lanes[lane][sent[lane]], last=False)
            sent[lane] += 1
        else:
            left += buffer.close(lane)
    assert left == list(itertools.chain.from_iterable(lanes.values()))
    assert not buffer._waiting
