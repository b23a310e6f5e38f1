"""The table of blocks: bounded, shared, read ahead, and gone at the end."""

import copy
import threading
from collections import Counter
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.contracts import Context
from pipegraph.errors import MemoryLimitError, ShardError
from pipegraph.reader.block_reader import BlockReader
from pipegraph.reader.block_sources import BlockSource
from pipegraph.reader.schedule import RankSteps
from pipegraph.storage import ShardFile
from pipegraph.storage.shard_files import BytesFile
from pipegraph.testing import Resources


class Blocks(BlockSource):
    """Blocks of 10 bytes that load when the test says so."""

    fetched, stride = True, 4

    def __init__(self, budget: int = 1000, gated: bool = False) -> None:
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.unknown_until_open = False
        self.failing: dict[int, Exception] = {}
        self.changed = threading.Condition()
        self._budget, self._gated = budget, gated
        self._allowed: Counter[int] = Counter()
        self._stopped = False

    def held_nbytes(self, number: int) -> int:
        return 0 if self.unknown_until_open and number not in self.opened else 10

    def budget(self) -> int:
        return self._budget

    def open(self, number: int, room: Any) -> tuple[ShardFile, Any]:
        with self.changed:
            self.opened.append(number)
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._gated or self._allowed[number] or self._stopped)
            self._allowed[number] -= 1
        if number in self.failing:
            raise self.failing[number]
        file = BytesFile(b"0123456789", str(number))
        file.close = lambda: self._has_closed(number)  # type: ignore[method-assign]
        return file, f"block {number}"

    def allow(self, number: int) -> None:
        with self.changed:
            self._allowed[number] += 1
            self.changed.notify_all()

    def wait_until_opened(self, *numbers: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: set(numbers) <= set(self.opened), 20)

    def wait_until_closed(self, *numbers: int) -> None:
        """By whichever thread comes to it: what a worker's load pushes out may be closed by one of the reader's."""
        with self.changed:
            assert self.changed.wait_for(lambda: set(numbers) <= set(self.closed), 20)

    def _has_closed(self, number: int) -> None:
        with self.changed:
            self.closed.append(number)
            self.changed.notify_all()

    def name(self, number: int) -> str:
        return f"block {number}"

    def close(self) -> None:
        with self.changed:
            self._stopped = True
            self.changed.notify_all()


def deal(blocks: list[int], epoch: int = 0, start: int = 0) -> RankSteps:
    array = np.array(blocks)
    return RankSteps(epoch, start, len(blocks), lambda first, last: array[first:last])


@pytest.fixture
def make_reader() -> Any:
    readers: list[BlockReader] = []
    counted: Counter[str] = Counter()

    def make(source: BlockSource, ahead: bool = True) -> BlockReader:
        readers.append(BlockReader(source, ahead, lambda name, n: counted.update({name: n})))
        return readers[-1]

    make.counted = counted  # type: ignore[attr-defined]
    before = Resources.now()
    yield make
    for reader in readers:
        reader.close()
    assert not [leak for leak in Resources.now().leaked_since(before) if "pipegraph" in leak]


def test_the_next_block_is_loaded_before_it_is_asked_for(make_reader: Any) -> None:
    source = Blocks()
    reader = make_reader(source)
    reader.dealt(deal([7] * 10 + [3] * 10 + [5] * 10))
    source.wait_until_opened(7)
    reader.release(reader.acquire(7, 0, 0))
    source.wait_until_opened(3)


def test_blocks_are_read_ahead_in_the_order_of_first_use_as_far_as_there_is_room(make_reader: Any) -> None:
    source = Blocks(budget=30, gated=True)
    reader = make_reader(source)
    reader.dealt(deal([4] * 10 + [2] * 10 + [9] * 10 + [1] * 10))
    source.wait_until_opened(4, 2, 9)
    assert 1 not in source.opened
    for number in (4, 2, 9):
        source.allow(number)
    reader.release(reader.acquire(4, 0, 9))
    reader.release(reader.acquire(2, 0, 10))  # the first one is not needed any more
    source.wait_until_opened(1)
    source.wait_until_closed(4)


def test_several_workers_share_one_load_of_a_block(make_reader: Any) -> None:
    source = Blocks(gated=True)
    reader = make_reader(source, ahead=False)
    values: list[Any] = []
    threads = [
        threading.Thread(target=lambda: values.append(reader.acquire(1, 0, None).value)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    source.wait_until_opened(1)
    source.allow(1)
    for thread in threads:
        thread.join(20)
    assert values == ["block 1"] * 4
    assert source.opened == [1]


def test_a_block_that_is_waited_for_is_read_before_it_makes_room_for_another(make_reader: Any) -> None:
    source = Blocks(budget=10, gated=True)
    reader = make_reader(source, ahead=False)
    values: list[Any] = []

    def work(number: int) -> None:
        entry = reader.acquire(number, 0, None)
        values.append(entry.value)
        reader.release(entry)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for number in range(3):
        source.allow(number)
    for thread in threads:
        thread.join(20)
    assert sorted(values) == ["block 0", "block 1", "block 2"]
    assert sorted(source.opened) == [0, 1, 2]


def test_a_block_that_outgrows_the_budget_is_an_error_that_says_what_helps(make_reader: Any) -> None:
    class Huge(Blocks):
        def open(self, number: int, room: Any) -> tuple[ShardFile, Any]:
            for nbytes in range(10, 1000, 10):
                room(nbytes)
            raise AssertionError

    reader = make_reader(Huge(budget=50), ahead=False)
    with pytest.raises(MemoryLimitError, match=r"block 3 takes more than 50 bytes .*Load\(columns="):
        reader.acquire(3, 0, None)
    assert reader._table.nbytes == 0


def test_no_more_is_loaded_at_once_than_there_is_room_for(make_reader: Any) -> None:
    source = Blocks(budget=20, gated=True)
    reader = make_reader(source, ahead=False)
    threads = [
        threading.Thread(target=lambda n=n: reader.release(reader.acquire(n, 0, None))) for n in range(3)
    ]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    with source.changed:
        assert source.changed.wait_for(lambda: len(source.opened) == 2, 20)
        waiting = ({0, 1, 2} - set(source.opened)).pop()
    with reader._lock:
        assert [entry.state for entry in reader._table].count("loading") == 2
        assert reader._table.nbytes == 20
    for number in {0, 1, 2} - {waiting}:
        source.allow(number)
    source.wait_until_opened(waiting)
    source.allow(waiting)
    for thread in threads:
        thread.join(20)
    # A load that is alone may begin while the others' blocks are still being read: one always continues.
    assert reader._table.nbytes <= 30


def test_where_blocks_do_not_fit_the_one_used_farthest_ahead_goes(make_reader: Any) -> None:
    """Seven blocks in turn with room for five: of each round only what does not fit is loaded anew."""
    source = Blocks(budget=50)
    reader = make_reader(source, ahead=False)
    steps, planned = list(range(7)) * 30, threading.Event()
    merge = reader._steps.merge

    def merged(*found: Any) -> None:
        merge(*found)
        planned.set()

    reader._steps.merge = merged  # type: ignore[method-assign]
    reader.dealt(deal(steps))
    assert planned.wait(20)  # all steps are one draw; what the plan does not know yet goes first
    for step, number in enumerate(steps):
        reader.release(reader.acquire(number, 0, step))
    # The least recently used one would be the wrong one each time: 210 loads. Belady's rule needs about a third.
    assert len(source.opened) == 74


def test_what_is_held_stays_within_the_budget_and_blocks_in_use_stay(make_reader: Any) -> None:
    source = Blocks(budget=30)
    reader = make_reader(source, ahead=False)
    kept = reader.acquire(0, 0, None)
    for number in range(1, 8):
        reader.release(reader.acquire(number, 0, None))
        assert len(reader._table) <= 3
        if number > 2:
            source.wait_until_closed(number - 2)
    assert 0 not in source.closed
    assert source.closed == [1, 2, 3, 4, 5]
    reader.release(kept)


def test_a_block_that_fails_is_an_error_for_each_of_its_samples_and_is_loaded_again_for_a_retry(
    make_reader: Any,
) -> None:
    source = Blocks()
    source.failing[1] = ShardError("broken")
    reader = make_reader(source, ahead=False)
    errors = []
    for step in (0, 1):
        with pytest.raises(ShardError, match="broken") as caught:
            reader.acquire(1, 0, step)
        caught.value.add_note(f"of step {step}")
        errors.append(caught.value)
    assert [error.__notes__ for error in errors] == [["of step 0"], ["of step 1"]]
    assert source.opened == [1]
    source.failing.clear()
    assert reader.acquire(1, 0, 1).value == "block 1"
    assert source.opened == [1, 1]


def remote_graph(url: str, manifest: Any, lanes: int = 8) -> pg.Graph:
    graph = pg.Graph("remote")
    select = ops.ShardSelect(f"{url}/*", order=pg.order.LaneOrder(lanes=lanes), manifest=manifest)
    graph.add(select, name="select").then(ops.Load(), name="load").then(ops.Batch(8))
    return graph


def test_a_loader_leaves_nothing_behind_after_a_break_and_after_close(
    write_shards: Any, upload: Any, make_manifest: Any
) -> None:
    folder = write_shards("tar", 4, 60)
    graph = remote_graph(upload(folder), make_manifest(folder))
    for _ in graph.loader():
        break
    with graph.loader(epochs=3) as loader:
        for _ in range(3):
            for number, _batch in enumerate(loader):
                if number == 3:
                    break
    left = [t.name for t in threading.enumerate() if t.name.startswith("pipegraph")]
    assert not left


def test_a_worker_that_joins_in_mid_pass_leaves_what_was_dealt(write_shards: Any) -> None:
    select = ops.ShardSelect(f"{write_shards('tar')}/*")
    shared: dict[str, Any] = {}
    dealing, joining = copy.copy(select), copy.copy(select)
    for each in (dealing, joining):
        each.open(Context("select", share=lambda name, make: shared.setdefault(name, make())))
        each.begin_run(0, ())
        if each is dealing:
            next(each.positions(0, 0, 1, 0))
    reader = Mock()
    shared["feed"].subscribe(reader)
    (call,) = reader.dealt.call_args_list
    assert call.args[0].epoch == 0
