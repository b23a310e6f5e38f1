"""From one number of ranks to another, in the middle of epochs, on real shards."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError, StateError
from pipegraph.storage import Manifest

RUN = (8, 6, 5, 16, 7, 1)
GLOBAL = 1680  # the least multiple of all of them

Place = tuple[int, Any]


def graph_of(folder: Any, order: pg.order.Order, manifest: Manifest | None, size: int = GLOBAL) -> pg.Graph:
    graph = pg.Graph("elastic", seed=5)
    select = ops.ShardSelect(folder, order=order, manifest=manifest)
    # Short queues: most ranks stop after one step, and what they read ahead is thrown away.
    graph.add(select, capacity=1).then(ops.Load(), capacity=1).then(
        ops.Batch(global_size=size, collate=list), capacity=1
    )
    return graph


class World:
    """All ranks of one run, each with a loader of its own, stepped together."""

    def __init__(self, make: Callable[[], pg.Graph], ranks: int, state: Any = None) -> None:
        self.loaders = [make().loader(rank=rank, world_size=ranks) for rank in range(ranks)]
        for loader in self.loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))

    def steps(self) -> Iterator[list[Place]]:
        """The global batch of each step: (position, first value), sorted."""
        for chunks in zip(*(loader.chunks() for loader in self.loaders), strict=True):
            yield sorted(
                (int(position), int(sample["array"][0]))
                for chunk in chunks
                for position, sample in zip(chunk.positions, chunk.data, strict=True)
            )

    def state(self) -> dict[str, Any]:
        """As torch.distributed.checkpoint gathers it: every rank's part in one dict."""
        whole: dict[str, Any] = {}
        for loader in self.loaders:
            whole |= loader.state_dict()
        return whole

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *exc: object) -> None:
        for loader in self.loaders:
            loader.close()


def chain(make: Callable[[], pg.Graph], stops: list[int]) -> list[list[Place]]:
    """Global batches of one epoch whose number of ranks changes after each of these numbers of steps."""
    batches, state = [], None
    for ranks, limit in zip(RUN, [*stops, None], strict=True):
        with World(make, ranks, state) as world:
            for number, batch in enumerate(world.steps(), 1):
                batches.append(batch)
                if number == limit:
                    break
            state = world.state()
    return batches


@pytest.mark.parametrize(
    "turn", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_lanes_give_the_same_global_batches_through_8_6_5_16_7_and_1_ranks(
    write_shards: Any, make_manifest: Any, turn: int
) -> None:
    folder = write_shards("npy", 4, 2_950)
    manifest = make_manifest(folder, block_nbytes=100_000)
    make = lambda: graph_of(folder, pg.order.LaneOrder(lanes=24 + turn), manifest)  # noqa: E731
    with World(make, 1) as alone:
        whole = list(alone.steps())
    assert chain(make, random.Random(turn).sample([1, 1, 1, 1, 2], 5)) == whole
    assert [position for batch in whole for position, _ in batch] == list(range(len(manifest)))


@pytest.mark.parametrize(
    "order",
    [pg.order.PartOrder(), pg.order.BlockOrder(shuffle=True), pg.order.StridedOrder(shuffle=True)],
    ids=lambda order: type(order).__name__,
)
def test_other_orders_give_each_sample_once_through_all_these_ranks(
    write_shards: Any, make_manifest: Any, order: pg.order.Order
) -> None:
    folder = write_shards("npy", 9, 950)
    manifest = make_manifest(folder, block_nbytes=100_000)
    batches = chain(lambda: graph_of(folder, order, manifest), [1, 1, 1, 1, 1])
    total = len(manifest)
    real = Counter(value for batch in batches for position, value in batch if position < total)
    assert len(real) == total
    assert set(real.values()) == {1}


def test_whole_parts_without_a_manifest_resume_at_the_same_size_only(write_shards: Any) -> None:
    folder = write_shards("npy", 4, 40)
    make = lambda: graph_of(folder, pg.order.PartOrder(), None, 4)  # noqa: E731
    with make().loader(rank=0, world_size=2, equal_steps=False) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make().loader(rank=0, world_size=1) as loader, pytest.raises(StateError, match="same size"):
        loader.load_state_dict(state)


def test_a_global_size_that_ranks_do_not_divide_names_its_neighbours(
    write_shards: Any, make_manifest: Any
) -> None:
    folder = write_shards("npy", 2, 40)
    graph = graph_of(folder, pg.order.LaneOrder(), make_manifest(folder), 10)
    with graph.loader(rank=0, world_size=3) as loader, pytest.raises(GraphError, match="use 9 or 12"):
        next(iter(loader))
