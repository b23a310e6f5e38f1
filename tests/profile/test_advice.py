"""Advice over profiles, without threads: the resource that is loaded most sets the pace."""

from dataclasses import replace

import pytest

import pipegraph as pg
from pipegraph.backends import INLINE, PROCESS
from pipegraph.profile.advice import Advice, Prediction
from pipegraph.profile.bottleneck import CONSUMER
from pipegraph.profile.model import pipeline_of
from pipegraph.profile.values import ChannelProfile
from pipegraph.units import format_gain


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


def test_gains_are_rounded_to_sense():
    assert [format_gain(gain) for gain in (0.0, 0.534, -0.1, 101.93)] == [
        "+0 %",
        "+53 %",
        "-10 %",
        "103 times",
    ]


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


def test_a_stage_that_waits_is_given_64_workers_and_what_they_may_do_to_a_service_is_said():
    stages = {"read": (0.640, 2)}
    found = pipeline(stages, elapsed_s=32.0)
    assert found.advice.settings == {"read": {"workers": 64, "capacity": 128}}
    assert str(found.advice).endswith(
        "then 'read' sets the pace: 64 workers are the most that it is given. If they read from a service, 64 "
        "connections at once may be throttled."
    )
    _, second = followed(stages, found)
    assert second.advice.settings == {} and "64 workers are the most" in second.advice.limit
    few = pipeline({"read": (0.008, 1)})
    assert few.advice.settings["read"]["workers"] < 16 and not few.advice.caution
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


WHY = "fromiterable can only be read in sequence"


def test_a_stage_that_works_in_sequence_gains_nothing_from_workers_and_what_helps_is_said():
    found = remade(pipeline({"read": (0.010, 1)}), "read", fixed=WHY, remedy="a random-access source")
    assert found.advice.settings == {}
    assert (
        f"No other sizes help: 'read' sets the pace: {WHY}; what helps: a random-access source"
        in found.conclusion
    )


def test_others_are_raised_only_as_far_as_a_stage_that_works_in_sequence_allows():
    found = remade(pipeline({"read": (0.002, 1), "decode": (0.010, 1)}), "read", fixed=WHY)
    assert found.advice.settings["decode"]["workers"] == 6 and "read" not in found.advice.settings
    assert found.advice.limit == f"'read' sets the pace: {WHY}"


def test_a_sampler_is_not_helped_by_workers_of_its_source():
    found = remade(pipeline({"read": (0.0001, 4), "map": (0.002, 1)}), "read", drawing=1.0)
    assert found.advice.settings == {} and "its sampler draws one index after the other" in found.advice.limit


def test_workers_that_wait_for_each_other_are_not_multiplied():
    found = remade(pipeline({"call": (0.080, 8)}), "call", shared=True)
    assert found.advice.settings == {} and "wait for each other" in found.advice.limit


def test_one_worker_that_holds_the_lock_is_sent_to_processes_without_any_other_stage():
    found = remade(pipeline({"tokenize": (0.010, 1)}, wake_s=0.004), "tokenize", running=0.98)
    assert found.advice.processes == ("tokenize",) and found.advice.settings["tokenize"]["workers"] == 4
    assert "'tokenize' with backend=\"process\", 4 workers in 'tokenize': at most" in found.conclusion


def test_a_queue_that_is_empty_in_turn_with_full_is_proposed_to_be_longer():
    found = pipeline({"read": (0.006, 1)}, step_s=0.008, cause="bursts", bottleneck=CONSUMER)
    found = replace(found, channels=(replace(found.channels[0], in_bursts=True),))
    assert found.advice.settings == {"read": {"capacity": 32}}
    assert (
        "Work comes in bursts" in found.conclusion
        and "capacity=32 in 'read': at most 125" in found.conclusion
    )


@pytest.mark.parametrize(
    ("running", "coreless", "most"),
    [
        (0.01, 0.55, 64),  # it sleeps, and continues late
        (0.08, 0.90, 4),  # it computes, and gets a twelfth of a core
        (0.90, 0.05, 4),
    ],
)
def test_what_waits_is_not_taken_for_computing_where_others_take_the_cores(running, coreless, most):
    found = pipeline({"read": (0.064, 1)}, elapsed_s=6.4)
    found = remade(found, "read", busy=1.0, running=running, coreless=coreless)
    assert most <= found.advice.settings["read"]["workers"] <= most * 1.2


def test_stages_that_share_their_workers_are_given_more_together():
    found = pipeline({"a": (0.010, 2), "b": (0.010, 2), "map": (0.001, 1)})
    for name in "ab":
        found = remade(found, name, backend=PROCESS)
    found = remade(remade(found, "a", busy=0.5), "b", busy=0.5, workers=0, within="a")
    channels = tuple(each for each in found.channels if each.producer != "b")
    found = replace(found, channels=(replace(channels[0], consumer="map"), *channels[1:]))
    assert found.advice.settings == {"a": {"workers": 8}, "b": {"workers": 8, "capacity": 16}}
    assert "With 8 workers in 'a', 8 workers in 'b': at most" in str(found.advice)


def test_an_inline_stage_whose_work_others_do_is_given_no_workers():
    found = pipeline({"read": (0.0, 1), "decode": (0.010, 1)}, bottleneck="decode")
    found = remade(found, "read", workers=0, within="decode", backend=INLINE)
    assert list(found.advice.settings) == ["decode"]


def test_one_worker_and_two_queues_are_named_in_the_right_number():
    assert "With 1 worker in 'a'" in str(
        Advice({"a": {"workers": 1}}, prediction=Prediction(2.0, 1.0), limit="b")
    )
    found = pipeline({"a": (0.006, 1), "b": (0.006, 1)}, step_s=0.008, cause="bursts", bottleneck=CONSUMER)
    both = replace(found, channels=tuple(replace(each, in_bursts=True) for each in found.channels))
    one = replace(found, channels=(found.channels[0], replace(found.channels[1], in_bursts=True)))
    assert "the queues between 'a' and 'b', between 'b' and training were sometimes" in both.conclusion
    assert "the queue between 'b' and training was sometimes" in one.conclusion


def test_work_whose_results_still_wait_in_queues_is_not_taken_for_work_on_what_was_delivered():
    found = pipeline({"read": (0.006, 1), "map": (0.010, 1)})
    ahead = remade(
        found, "read", items=160, busy=0.96
    )  # 60 of them are in the queue, which was empty at first
    queue = replace(found.channels[0], depth=60, capacity=64, gained=60)
    found = replace(ahead, channels=(queue, found.channels[1]))
    assert pipeline_of(found).works["read"].seconds == pytest.approx(0.006)
    steady = replace(found, channels=(replace(queue, gained=0), found.channels[1]))
    assert pipeline_of(steady).works["read"].seconds == pytest.approx(0.0096)
