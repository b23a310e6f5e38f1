"""How late blocks came: transition by transition, in bounded memory, and in the profile."""

import json
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.reader.block_reader import BlockReader
from pipegraph.reader.block_sources import BlockSource
from pipegraph.reader.late_blocks import WORST, LateBlocks, Standing
from pipegraph.reader.uses import RankSteps
from pipegraph.storage import BytesFile, ShardFile


def enter(late_blocks: LateBlocks, number: int, waited_s: float, at: float, cold_start: bool = False) -> None:
    wanted = None if not waited_s else at - waited_s
    late_blocks.entered(f"part, block {number}", 0, number, wanted, at, at, 0.0, cold_start)


def test_only_the_worst_switches_are_kept_and_all_are_counted() -> None:
    late_blocks = LateBlocks()
    for number in range(1000):
        enter(late_blocks, number, (number % 100) * 1e-3, float(number))
    report = late_blocks.to_dict()
    assert (report["entered"], report["late"]) == (1000, 990)
    assert report["waited_us"] == 10 * sum(range(100)) * 1000
    assert [transition["waited_us"] for transition in report["worst"]] == [99_000] * WORST
    assert report["worst"][0]["name"] == "part, block 999"
    for share, expected in ((50, 49_000), (95, 94_000), (99, 98_000)):
        assert report[f"p{share}_us"] == pytest.approx(expected, rel=0.011)
    json.dumps(report)


def test_percentiles_count_the_switches_that_were_in_time() -> None:
    late_blocks = LateBlocks()
    for number in range(100):
        enter(late_blocks, number, 0.5 if number < 3 else 0.0, float(number))
    report = late_blocks.to_dict()
    assert (report["p50_us"], report["p95_us"]) == (0, 0)
    assert report["p99_us"] == pytest.approx(500_000, rel=0.011)


def test_the_opening_counts_apart_and_nothing_is_said_before_a_switch() -> None:
    late_blocks = LateBlocks()
    enter(late_blocks, 0, 2.0, 5.0, cold_start=True)
    assert late_blocks.lines() == []
    report = late_blocks.to_dict()
    assert (report["entered"], report["cold_start"], report["cold_start_waited_us"]) == (0, 1, 2_000_000)


def test_waits_of_several_workers_at_once_count_once() -> None:
    standing = Standing()
    standing.begin(1.0)
    standing.begin(2.0)
    assert standing.total(3.0) == 2.0
    assert standing.end(4.0) is None
    assert standing.end(6.0) == 5.0
    assert standing.total(9.0) == 5.0


class Gated(BlockSource):
    """Blocks that come when the test says so, while its clock stands."""

    fetched, stride, steps_per_block = True, 1, 4.0

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


def test_each_late_switch_is_told_with_when_it_was_wanted_and_when_there() -> None:
    now_s, source, late_blocks = 100.0, Gated(), LateBlocks()
    counted: Counter[str] = Counter()
    reader = BlockReader(
        source,
        False,
        lambda name, n: counted.update({name: n}),
        late_blocks,
        lambda: now_s,
    )
    blocks = np.repeat([4, 7, 9], 4)
    reader.dealt(RankSteps(0, 0, 0, 12, lambda first, last: blocks[first:last]))

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
    report = late_blocks.to_dict()
    assert (report["cold_start"], report["entered"], report["late"], report["waited_us"]) == (
        1,
        2,
        2,
        1_000_000,
    )
    assert report["starved"] == pytest.approx(1.0 / 10.0)
    assert report["worst"] == [
        {"waited_us": 750_000, "name": "part-09", "epoch": 0, "step": 8, "wanted_s": 12.25, "there_s": 13.0},
        {"waited_us": 250_000, "name": "part-07", "epoch": 0, "step": 4, "wanted_s": 9.0, "there_s": 9.25},
    ]
    assert late_blocks.lines()[0].startswith("blocks late: 2 of 2, 10 % of the time, waits p95 ")
    assert "late by 750 ms: part-09, epoch 0, step 8" in late_blocks.lines()[1]
    assert counted["us waited for blocks"] == 4_000_000


def test_the_profile_tells_late_blocks_by_name(write_shards: Any, upload: Any, make_manifest: Any) -> None:
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
    report = profile.stages["load"].reports["blocks"]
    assert report["entered"] + report["cold_start"] == profile.stages["load"].counters["blocks loaded"]
    assert report["late"] == report["entered"] > 10  # nothing is fetched before it is requested
    assert report["worst"][0]["name"].startswith("part-0")
    assert f"load: blocks late: {report['late']} of {report['entered']}, " in str(profile)
    assert report["worst"][0]["name"] in str(profile)
    assert json.loads(profile.to_json())["stages"]["load"]["reports"]["blocks"]["late"] == report["late"]
