"""A fault planted in the engine is found; ``docs/schedules.md`` has the table of all."""

import logging

import pytest
from schedule_models.planted import FAULTS, planted
from scheduler import Found, explore

MOST = 2_000
"""Schedules in which each must be found; most need fewer than a hundred."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, caplog):
    caplog.set_level(logging.CRITICAL)
    fault.model.prepare()
    with planted(fault), pytest.raises(Found):
        explore(fault.model, schedules=MOST, lines=fault.lines)
