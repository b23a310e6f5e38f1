"""Blocks that come late are counted, and the time that workers wait for them; also in the profile."""

import threading
from collections import Counter
from typing import Any

import numpy as np

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.reader.block_reader import BlockReader
from pipegraph.reader.block_sources import BlockSource
from pipegraph.reader.schedule import RankSteps
from pipegraph.storage import ShardFile
from pipegraph.storage.shard_files import BytesFile


class Gated(BlockSource):
    """Blocks that come when the test says so, while its clock stands."""

    fetched, stride = True, 1

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.asked: list[int] = []
        self.let: set[int] = set()
        self.over = False

    def held_nbytes(self, number: int) -> int:
        return 10

    def budget(self) -> int:
        return 1000

    def name(self, number: int) -> str:
        return f"part-{number:02}"

    def open(self, number: int, room: Any) -> tuple[ShardFile, Any]:
        with self.changed:
            self.asked.append(number)
            self.changed.notify_all()
            self.changed.wait_for(lambda: number in self.let or self.over)
        return BytesFile(b"", str(number)), [{"n": number}]

    def come(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: number in self.asked, 20)
            self.let.add(number)
            self.changed.notify_all()

    def interrupt(self) -> None:
        with self.changed:
            self.over = True
            self.changed.notify_all()

    def close(self) -> None:
        pass


def test_blocks_that_come_late_are_counted_and_those_of_the_cold_start_are_not() -> None:
    now_s, source = 100.0, Gated()
    counted: Counter[str] = Counter()
    reader = BlockReader(
        source,
        False,
        lambda name, n: counted.update({name: n}),
        lambda: now_s,
    )
    blocks = np.repeat([4, 7, 9], 4)
    reader.dealt(RankSteps(0, 0, 12, lambda first, last: blocks[first:last]))

    def read(number: int, step: int, waits_s: float) -> None:
        nonlocal now_s
        worker = threading.Thread(target=reader.sample, args=(number, 0, 0, step))
        worker.start()
        with source.changed:
            assert source.changed.wait_for(lambda: number in source.asked, 20)
        now_s += waits_s
        source.come(number)
        worker.join(20)
        assert not worker.is_alive()

    try:
        read(4, 0, 3.0)  # the first block of a run cannot be there before
        now_s += 6.0
        read(7, 4, 0.25)
        now_s += 3.0
        read(9, 8, 0.75)
        reader.sample(9, 0, 0, 9)
    finally:
        reader.close()
    assert (counted["blocks loaded"], counted["blocks late"]) == (3, 2)
    assert counted["us waited for blocks"] == 4_000_000


def test_the_profile_tells_how_many_blocks_were_late(
    write_shards: Any, upload: Any, make_manifest: Any
) -> None:
    folder = write_shards("tar", 4, 300)
    graph = pg.Graph("late")
    select = ops.ShardSelect(
        f"{upload(folder)}/*",
        order=pg.order.LaneOrder(lanes=2),
        manifest=make_manifest(folder, block_nbytes=40_000),
    )
    graph.add(select).then(ops.Load(preload=False), name="load").then(ops.Batch(16))
    with graph.loader() as loader:
        for _ in loader:
            pass
    profile = loader.profile()
    counters = profile.stages["load"].counters
    # Nothing is fetched before it is requested.
    assert 10 < counters["blocks late"] < counters["blocks loaded"]
    assert f"blocks late {counters['blocks late']:,}" in str(profile)
