"""Advice over profiles, without threads: the resource that is loaded most sets the pace."""

from dataclasses import replace

import pytest

import pipegraph as pg
from pipegraph.profile.bottleneck import CONSUMER
from pipegraph.profile.values import ChannelProfile


def pipeline(stages, step_s=0.001, items=100, elapsed_s=1.0, **facts):
    """A chain that delivers ``items`` in ``elapsed_s``; ``stages`` are ``name -> (seconds per item, workers)``."""
    made, channels = {}, []
    names = list(stages)
    for name, (seconds, workers) in stages.items():
        busy = seconds * items / workers / elapsed_s
        made[name] = pg.types.StageProfile(
            items=items,
            samples=items,
            rate=items / elapsed_s,
            busy=busy,
            workers=workers,
            starved=1 - busy,
            running=0.0,
        )
    for producer, consumer in zip(names, [*names[1:], CONSUMER], strict=True):
        channels.append(ChannelProfile(producer, consumer, capacity=4))
    given = {"stages": made, "bottleneck": names[0], "stall_s": elapsed_s - step_s * items, "quarantined": ()}
    given |= {"samples_per_s": items / elapsed_s, "elapsed_s": elapsed_s, "items": items, "samples": items}
    given |= {"channels": tuple(channels), "step_s": step_s, "cores": 4.0, "cause": "stage"}
    return pg.Profile(**{**given, **facts})


def remade(found, name, **changes):
    """A profile of which one stage was measured otherwise."""
    stages = {**found.stages, name: replace(found.stages[name], **changes)}
    return replace(found, stages=stages)


def followed(stages, found):
    """The same pipeline once advice was followed, by the model of a chain whose slowest stage sets the pace."""
    more = {
        name: (seconds, found.advice.settings.get(name, {}).get("workers", workers))
        for name, (seconds, workers) in stages.items()
    }
    slowest = max(0.001, *(seconds / workers for seconds, workers in more.values()))
    return more, pipeline(more, elapsed_s=100 * slowest)


def test_the_number_is_proposed_in_one_step_and_a_second_look_proposes_nothing_more():
    stages = {"read": (0.064, 1), "decode": (0.008, 1)}
    found = pipeline(stages, elapsed_s=6.4)
    assert found.advice.settings["read"]["workers"] == 64 and found.advice.settings["decode"]["workers"] >= 8
    assert found.advice.prediction.samples_per_s == pytest.approx(1000)
    assert "at most 1,000 samples/s (64 times); then training sets the pace" in found.conclusion
    _, second = followed(stages, found)
    assert second.advice.settings == {} and second.advice.limit == "training sets the pace"


def test_a_stage_that_waits_is_given_64_workers_at_most():
    stages = {"read": (0.640, 2)}
    found = pipeline(stages, elapsed_s=32.0)
    assert found.advice.settings == {"read": {"workers": 64, "capacity": 128}}
    assert str(found.advice).endswith("then 'read' sets the pace: 64 workers are the most that it is given.")
    _, second = followed(stages, found)
    assert second.advice.settings == {} and "64 workers are the most" in second.advice.limit
    few = pipeline({"read": (0.008, 1)})
    assert few.advice.settings["read"]["workers"] < 16
    own = pipeline({"read": (0.640, 100)})  # as many as its user gave it
    assert own.advice.settings == {} and "100 workers are the most" in own.advice.limit


@pytest.mark.parametrize(
    ("samples", "capacity", "longer"), [(100, 64, 512), (100, 512, None), (800, 2, 16), (800, 16, None)]
)
def test_a_queue_is_lengthened_once_by_advice_that_is_followed(samples, capacity, longer):
    found = pipeline({"read": (0.006, 1)}, step_s=0.008, cause="bursts", bottleneck=CONSUMER)
    found = remade(found, "read", samples=samples)
    found = replace(found, channels=(replace(found.channels[0], capacity=capacity, in_bursts=True),))
    assert found.advice.settings == ({"read": {"capacity": longer}} if longer else {})


def test_a_stage_that_computes_is_given_the_cores_and_the_next_look_says_so():
    found = remade(pipeline({"decode": (0.010, 1)}), "decode", running=1.0)
    assert found.advice.settings == {"decode": {"workers": 4, "capacity": 8}}
    second = remade(pipeline({"decode": (0.010, 4)}, elapsed_s=0.25), "decode", running=1.0)
    assert second.advice.settings == {}


def test_memory_limit_bounds_what_is_proposed_and_is_named():
    found = pipeline({"read": (0.064, 1)}, elapsed_s=6.4, memory_limit=1000, memory_peak_bytes=100)
    found = remade(found, "read", nbytes=100 * 100)
    assert 1 < found.advice.settings["read"]["workers"] <= 10
    assert "memory_limit leaves 900 bytes" in found.conclusion
