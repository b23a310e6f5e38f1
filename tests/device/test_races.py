"""The race checker finds work that no event orders, names both places, and nothing else."""

from __future__ import annotations

import inspect

import pytest
import torch
from simulated_device.races import Watch

FIRST, SECOND = "simulated:0", "simulated:1"


def line() -> int:
    """The caller's."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def allocated() -> torch.Tensor:
    """Memory that any stream may write: no earlier work of the allocating stream uses it any more."""
    values = torch.empty(4, device=FIRST)
    torch.accelerator.synchronize()
    return values


def test_a_read_that_waits_for_no_write_is_found_with_both_places(races: Watch) -> None:
    values = allocated()
    side = torch.Stream(FIRST)
    with side:
        written = line() + 1
        values.fill_(1)
    read = line() + 1
    values.sum()
    (race,) = races.races()
    assert (race.first.writes, race.second.writes) == (True, False)
    text = str(race)
    assert (
        f"written by aten::fill_ on stream {side.stream_id} of {FIRST}, given by tests/device/test_races.py:{written}"
        in text
    )
    assert f"read by aten::sum on stream 0 of {FIRST}, given by tests/device/test_races.py:{read}" in text
    with pytest.raises(AssertionError, match="ordered by no event"):
        races.check()


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_is_used_again_while_another_stream_reads_it_is_found(
    races: Watch, recorded: bool
) -> None:
    values = torch.ones(1024, device=FIRST)
    torch.accelerator.synchronize()
    side = torch.Stream(FIRST)
    with side:
        values.sum()
    if recorded:
        values.record_stream(side)
    del values
    torch.ones(1024, device=FIRST)
    found = races.races()
    assert bool(found) is not recorded
    assert recorded or "whoever was given the freed memory" in str(found[0])
