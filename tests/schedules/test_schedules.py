"""Every model holds in some schedules here, and in many with ``make schedules``."""

import pytest
from schedule_models import LINES, MODELS
from scheduler import explore, replay

BUDGET = 40
"""Schedules of a whole loader; of a small model as many times more as its weight says."""


@pytest.mark.parametrize("name", MODELS)
def test_a_model_holds_in_every_schedule(name, request):
    schedule = request.config.getoption("--schedule")
    if schedule:
        at_lines = schedule.startswith("lines.")
        replay(MODELS[name], schedule.removeprefix("lines."), LINES if at_lines else ())
    else:
        explore(MODELS[name], schedules=BUDGET * MODELS[name].weight)
