"""Predictions over profiles, without threads: the resource that is loaded most sets the pace."""

import pytest

import pipegraph as pg
from pipegraph.backends import INLINE
from pipegraph.errors import GraphError
from pipegraph.profile import CONSUMER, ChannelProfile
from pipegraph.units import format_gain


def pipeline(stages, step_s=0.001, items=100, elapsed_s=1.0, **facts):
    """A chain that delivers ``items`` in ``elapsed_s``; ``stages`` are ``name -> (seconds per item, workers)``."""
    made, channels = {}, []
    names = list(stages)
    for name, (seconds, workers) in stages.items():
        busy = seconds * items / workers / elapsed_s
        made[name] = pg.StageProfile(
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


def test_one_more_worker_at_the_bottleneck_brings_what_the_next_one_allows():
    found = pipeline({"read": (0.002, 1), "decode": (0.010, 1)})
    assert found.what_if("decode", workers=2).samples_per_s == pytest.approx(200)
    more = found.what_if("decode", workers=8)
    assert (more.samples_per_s, more.bottleneck) == (pytest.approx(500), "read")
    assert more.gain == pytest.approx(4.0)


def test_more_workers_elsewhere_bring_nothing():
    assert pipeline({"read": (0.002, 1), "decode": (0.010, 1)}).what_if("read", workers=9).gain == 0


def test_half_the_cost_of_the_bottleneck_doubles_the_rate_until_training_sets_the_pace():
    assert pipeline({"decode": (0.010, 1)}).what_if("decode", cost=0.5).samples_per_s == pytest.approx(200)
    limited = pipeline({"decode": (0.010, 1)}, step_s=0.008).what_if("decode", cost=0.5)
    assert (limited.samples_per_s, limited.bottleneck) == (pytest.approx(125), CONSUMER)


def test_a_cache_spares_the_stages_above_it_that_feed_nothing_else():
    found = pipeline({"read": (0.010, 1), "decode": (0.009, 1), "augment": (0.004, 1)})
    assert found.what_if("decode", cached=True).samples_per_s == pytest.approx(250)
    assert found.what_if("read", cached=True).samples_per_s == pytest.approx(1 / 0.009)


def test_inline_stages_take_the_time_of_whoever_drives_them():
    found = pipeline({"read": (0.010, 1), "inline": (0.006, 1)}, step_s=0.004)
    stages = dict(found.stages)
    stages["inline"] = pg.StageProfile(items=100, samples=100, busy=0.6, workers=1, backend=INLINE)
    found = pg.Profile(
        **{**{name: getattr(found, name) for name in found.__dataclass_fields__}, "stages": stages}
    )
    faster = found.what_if("read", cost=0.1)
    assert (faster.samples_per_s, faster.bottleneck) == (pytest.approx(100), CONSUMER)


def test_full_cores_leave_nothing_to_more_workers_and_something_to_less_work():
    found = pipeline({"decode": (0.010, 1)}, cause="cores")
    stages = {"decode": pg.StageProfile(items=100, samples=100, busy=1.0, running=0.9, workers=1)}
    found = pg.Profile(
        **{**{name: getattr(found, name) for name in found.__dataclass_fields__}, "stages": stages}
    )
    assert found.what_if("decode", workers=4).gain == pytest.approx(0)
    assert found.what_if("decode", cost=0.5).gain == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("stage", "change", "why"),
    [
        ("nobody", {}, "there is no stage 'nobody'"),
        ("read", {"cost": -1}, "cost must be >= 0"),
        ("read", {"workers": 0}, "workers must be >= 1"),
        (CONSUMER, {"workers": 2}, "workers must be >= 1"),
    ],
)
def test_changes_that_cannot_be_are_refused(stage, change, why):
    with pytest.raises(GraphError, match=why):
        pipeline({"read": (0.01, 1)}).what_if(stage, **change)


def test_nothing_delivered_predicts_nothing():
    assert pipeline({"read": (0.01, 1)}, items=0).what_if("read", workers=2).samples_per_s == 0


def test_gains_are_rounded_to_sense():
    found = pipeline({"read": (0.010, 1)}, step_s=0.004)
    assert found.what_if("read", cost=1.0).gain == 0.0
    assert "e-" not in str(found.what_if("read", workers=1))
    assert [format_gain(gain) for gain in (0.0, 0.534, -0.1, 101.93)] == [
        "+0 %",
        "+53 %",
        "-10 %",
        "103 times",
    ]
