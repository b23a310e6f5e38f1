"""Blocks that come late are counted, and the time that workers wait for them; also in the profile."""

from typing import Any

import pipegraph as pg
from pipegraph import operators as ops


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
