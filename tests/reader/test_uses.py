"""What will be read when: pure functions."""

import numpy as np
from hypothesis import given, strategies as st

from pipegraph.reader.schedule import Uses


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(0, 100))
def test_uses_name_each_block_once_by_its_first_step_and_know_every_next_one(
    blocks: list[int], start: int
) -> None:
    uses = Uses.of(np.array(blocks), start)
    assert sorted(uses.numbers.tolist()) == sorted(set(blocks))
    assert uses.first.tolist() == sorted(uses.first.tolist())
    assert uses.end == start + len(blocks)
    for number, first in zip(uses.numbers.tolist(), uses.first.tolist(), strict=True):
        steps = [start + i for i, block in enumerate(blocks) if block == number]
        assert first == steps[0]
        for step in range(start, uses.end + 1):
            assert uses.next_use(number, step) == next((each for each in steps if each >= step), None)
