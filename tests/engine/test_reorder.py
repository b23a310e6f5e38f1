"""The pure reorder buffer."""

import itertools

from hypothesis import given, strategies as st

from pipegraph.engine.reorder import ReorderBuffer


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
