"""Profiles of real graphs. Planted costs are held by gates and by spinning, never judged by the clock."""

import threading

import pytest

import pipegraph as pg
from pipegraph import operators as ops

ITEMS = 60


def works_for(milliseconds):
    """A function that takes this long; it waits without the GIL, as decoding and reading do."""
    never = threading.Event()

    def work(x):
        never.wait(milliseconds / 1000)
        return x

    return work


def chain(costs, workers, **options):
    graph = pg.Graph("planted")
    node = graph.add(ops.FromIterable(range(ITEMS)), name="source")
    for index, (cost, count) in enumerate(zip(costs, workers, strict=True)):
        node = node.then(works_for(cost), name=f"s{index}", workers=count, capacity=4, **options)
    return graph


@pytest.mark.parametrize(
    ("costs", "workers", "train", "expected"),
    [
        ((6, 1, 1), (1, 1, 1), 1, "s0"),
        ((1, 6, 1), (1, 1, 1), 1, "s1"),
        ((1, 1, 6), (1, 1, 1), 1, "s2"),
        ((1, 6, 1), (1, 2, 1), 1, "s1"),
        ((5, 8, 1), (1, 4, 1), 1, "s0"),
        ((1, 1, 1), (1, 1, 1), 6, "consumer"),
    ],
)
def test_a_planted_bottleneck_is_named_in_a_running_graph(costs, workers, train, expected):
    step = works_for(train)
    for _ in range(20):
        with chain(costs, workers).loader() as loader:
            for item in loader:
                step(item)
            found = loader.profile()
        busy = {"consumer": 1 - found.stall_s / found.elapsed_s}
        busy |= {name: stage.busy for name, stage in found.stages.items()}
        # A short pass whose start took long (imports, beside other programs) says little of its stages.
        if max(busy, key=busy.get) == expected and found.first_batch_s < found.elapsed_s / 10:
            break
    else:
        pytest.skip("other programs made another stage slower in each of 20 runs, so there is nothing to see")
    assert expected == found.bottleneck, str(found)


def test_items_samples_bytes_and_calls_are_counted_exactly():
    import numpy as np

    graph = pg.Graph("counted")
    node = graph.add(ops.FromIterable([np.zeros(100, np.uint8) for _ in range(10)]), name="source")
    node.then(ops.Filter(lambda x: True), name="keep").then(ops.Batch(4), name="batch")
    with graph.loader(epochs=2) as loader:
        for _ in range(2):
            assert [len(batch) for batch in loader] == [4, 4, 2]
        stages = loader.profile().stages
    assert (stages["source"].items, stages["source"].samples, stages["source"].nbytes) == (20, 20, 2000)
    assert (stages["batch"].items, stages["batch"].samples, stages["batch"].nbytes) == (6, 20, 2000)
    assert loader.profile().passes == 2
    assert (loader.profile().items, loader.profile().samples) == (6, 20)


def test_a_profile_is_there_before_the_first_pass_and_stays_after_close():
    loader = chain((0, 0), (1, 2)).loader()
    before = loader.profile()
    assert list(before.stages) == ["source", "s0", "s1"]
    assert (before.items, before.passes, before.first_batch_s, before.bottleneck) == (0, 0, None, "consumer")
    assert len(list(loader)) == ITEMS
    running = loader.profile()
    loader.close()
    closed = loader.profile()
    assert running.to_dict() == closed.to_dict()
    assert closed.stages["s1"].items == ITEMS
    assert closed.stages["s1"].workers == 2


def test_the_time_to_the_first_batch_stays_that_of_the_first():
    with chain((0,), (1,)).loader() as loader:
        batches = iter(loader)
        next(batches)
        first = loader.profile().first_batch_s
        assert len(list(batches)) == ITEMS - 1
        assert loader.profile().first_batch_s == first


def test_a_profile_after_an_error_counts_the_failure():
    def fails(x):
        if x == 5:
            raise ValueError("no")
        return x

    graph = pg.Graph("failing")
    graph.add(ops.FromIterable(range(10)), name="source").then(fails, name="fails")
    with graph.loader() as loader:
        with pytest.raises(ValueError, match="no"):
            list(loader)
        found = loader.profile()
    assert found.stages["fails"].failed == 1
    assert found.items == 5


def test_stages_that_the_plan_left_out_are_listed_with_no_workers():
    import torch

    graph = pg.Graph("host only")
    node = graph.add(ops.FromIterable([torch.zeros(2)]), name="source")
    node.then(ops.CopyToDevice("cpu"), name="copy")
    with graph.loader() as loader:
        list(loader)
        found = loader.profile()
    assert found.stages["copy"] == pg.types.StageProfile()
    assert "copy    left out" in str(found)


@pytest.mark.parametrize(
    ("add", "fixed", "helps"),
    [
        (
            lambda g: g.add(ops.FromIterable(range(9)), name="at"),
            "read in sequence",
            "a random-access source",
        ),
        (
            lambda g: g.add(ops.FromSequence(range(9))).then(ops.Batch(3), name="at"),
            "in sequence",
            "in the stage above",
        ),
        (
            lambda g: g.add(ops.FromSequence(range(9))).then(abs, name="at", backend="inline"),
            "inline",
            "thread",
        ),
        (lambda g: g.add(ops.FromSequence(range(9))).then(abs, name="at"), None, ""),
    ],
)
def test_a_stage_says_why_it_has_no_use_of_more_workers_and_what_helps(add, fixed, helps):
    graph = pg.Graph("fixed")
    add(graph)
    with graph.loader() as loader:
        list(loader)
        stage = loader.profile().stages["at"]
    assert (fixed is None and stage.fixed is None) or fixed in stage.fixed
    assert helps in stage.remedy
