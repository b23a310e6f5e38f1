"""Takes one wait out of the code: the calls from one line of a file do nothing."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipegraph.device import accelerator
from pipegraph.device.backend import Event
from pipegraph.device.copy import Arrival
from pipegraph.device.packed_copy import Computed

ROOT = Path(__file__).parents[2]
WAITS = (
    (accelerator.AcceleratorEvent, "wait"),
    (accelerator.AcceleratorEvent, "synchronize"),
    (accelerator.AcceleratorStream, "wait_event"),
    (accelerator.AcceleratorStream, "synchronize"),
    (accelerator.AcceleratorBackend, "read_on"),
    (accelerator.AcceleratorBackend, "synchronize"),
    (Arrival, "wait"),
    (Event, "delivered"),
    (Computed, "delivered"),
    (Arrival, "read_on"),
    (Arrival, "synchronize"),
)
MARKS = (".wait(", "event.delivered(", ".wait_event(", ".synchronize()", ".read_on(")


def waits_in(path: str) -> list[str]:
    """The statements of a file that wait for an event or a stream, as they are written."""
    lines = (ROOT / path).read_text().splitlines()
    code = [line.split("  #")[0].strip() for line in lines]
    return [
        line
        for line in code
        if any(mark in line for mark in MARKS) and "``" not in line and "def " not in line
    ]


def leave_out(monkeypatch: pytest.MonkeyPatch, path: str, line: str) -> list[int]:
    """Calls from ``line`` of ``path`` do nothing from now on. Returns a list that grows by each call left out."""
    left_out: list[int] = []
    for owner, name in WAITS:
        monkeypatch.setattr(owner, name, _unless(getattr(owner, name), path, line, left_out))
    return left_out


def _unless(method: Callable[..., Any], path: str, line: str, left_out: list[int]) -> Callable[..., Any]:
    def wait(*args: Any) -> Any:
        frame = sys._getframe(1)
        called = frame.f_code.co_filename
        if called.endswith(path) and line in linecache.getline(called, frame.f_lineno):
            left_out.append(frame.f_lineno)
            return None
        return method(*args)

    return wait
