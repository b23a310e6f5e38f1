"""Where training is and what it reads next, decided without threads."""

import numpy as np

from pipegraph.reader.block_table import BlockEntry, BlockTable
from pipegraph.reader.schedule import RankSteps, ReadSchedule, Uses


def deal(blocks: list[int], epoch: int = 0, start: int = 0) -> RankSteps:
    array = np.array(blocks)
    return RankSteps(epoch, start, len(blocks), lambda first, last: array[first:last])


def look(schedule: ReadSchedule, there: set[int] | None = None) -> None:
    """Draw until enough is known."""
    while (draw := schedule.next_draw()) is not None:
        uses = Uses.of(draw.deal.blocks(draw.first, draw.last), draw.base + draw.first)
        schedule.merge(uses, draw.base + draw.last, there or set())


def test_blocks_come_by_their_first_use_across_epochs() -> None:
    schedule = ReadSchedule(stride=256)
    schedule.add(deal([5, 5, 2, 5, 2, 9], start=1))
    schedule.add(deal([7, 2, 8], epoch=1))
    look(schedule)
    assert list(schedule.upcoming) == [(1, 5), (2, 2), (5, 9), (6, 7), (8, 8)]


def test_a_block_is_needed_up_to_its_last_known_use() -> None:
    schedule = ReadSchedule(stride=256)
    schedule.add(deal([1, 2, 1, 2, 3, 3]))
    look(schedule)
    assert schedule.next_use(1) is not None
    assert schedule.next_use(4) is None
    schedule.reached(0, 3)
    assert schedule.next_use(1) is None
    assert schedule.next_use(2) is not None


class Tens:
    """Blocks of 10 bytes."""

    stride = 4

    def held_nbytes(self, number: int) -> int:
        return 10

    def budget(self) -> int:
        return 20


def test_a_block_that_its_worker_has_not_begun_stays_though_others_have_gone_on() -> None:
    table = BlockTable(Tens())  # type: ignore[arg-type]
    schedule = ReadSchedule(Tens.stride)
    schedule.add(deal([0, 1, 2, 3]))
    look(schedule)
    for number in (0, 1):
        entry = table.next_start(schedule)
        assert isinstance(entry, BlockEntry)
        assert entry.number == number
        table.begin(entry, schedule)
        table.loaded(entry, schedule)
    schedule.reached(0, 1)  # the worker of step 1 is first
    one = table.get(1)
    assert one is not None
    table.use(one)
    one.fresh = False
    assert table.next_start(schedule) is None
    table.make_room(10, schedule)
    assert 0 not in table  # a worker that waits for a block comes first
