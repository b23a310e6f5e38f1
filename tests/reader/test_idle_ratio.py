"""The simulation of idle ratios: it meets the theory without preloading, and the claim with it."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
TRAIN_S = 6 * 3_600.0


@pytest.fixture
def idle_ratio(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return importlib.import_module("idle_simulation")


def scene_of(
    module, trainers=8, rate=10e6, barrier=False, preloading=False, jitter=0.1, parts=1_600, **changes
):
    facts = {"train_s": TRAIN_S, "held": 4} | changes
    return module.Scene(
        trainers, rate, facts["train_s"], barrier, preloading, jitter, facts["held"], parts=parts
    )


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("rate", [10e6, 100e6])
def test_without_preloading_trainers_idle_as_theory_says(idle_ratio, rate, barrier):
    scene = scene_of(idle_ratio, rate=rate, barrier=barrier)
    assert idle_ratio.idle_ratio(scene) == pytest.approx(idle_ratio.theory(scene), rel=0.02)


def test_the_example_of_27_minutes_and_6_hours_idles_7_percent_and_13_switches_a_half(idle_ratio):
    alone = scene_of(idle_ratio, trainers=1)
    assert idle_ratio.theory(alone) == pytest.approx(0.069, abs=0.001)
    assert idle_ratio.theory(scene_of(idle_ratio, trainers=13, barrier=True)) == pytest.approx(0.49, abs=0.01)


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("ratio", [0.07, 0.5, 0.89])
def test_with_preloading_they_idle_below_1_percent(idle_ratio, ratio, barrier):
    scene = scene_of(idle_ratio, barrier=barrier, preloading=True, train_s=1_600 / ratio)
    assert idle_ratio.idle_ratio(scene) < 0.01


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("ratio", [0.07, 0.5, 0.89])
def test_lanes_idle_as_theory_says_without_preloading_and_below_1_percent_with_it(idle_ratio, ratio, barrier):
    scene = scene_of(idle_ratio, trainers=4, barrier=barrier, train_s=1_600 / ratio, parts=4 * 1_200)
    scene = dataclasses.replace(scene, lanes=15)
    without = idle_ratio.idle_ratio(scene)
    assert without == pytest.approx(idle_ratio.theory(scene), rel=0.05)
    assert idle_ratio.idle_ratio(dataclasses.replace(scene, preloading=True)) < 0.01
