"""Compares cursors, copies fan-ins, and restores them from JSON. Pure."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

from pipegraph.chunk import Cursor
from pipegraph.contracts import FanIn
from pipegraph.tree import copy_containers


def freeze(value: object) -> Any:
    """Convert JSON's lists back to tuples; dicts, which hold snapshots, are left alone."""
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


def compare(a: Cursor, b: Cursor) -> int:
    """Negative, 0 or positive if cursor ``a`` is before, at or after ``b`` on the same edge.

    None is the start; snapshots are ignored. Visits each part of a cursor once: cursors are nested, and separate tests
    for "before" and "after" would double the work at each level.
    """
    if a is b:
        return 0
    if a is None:
        return -1
    if b is None:
        return 1
    if isinstance(a, tuple) and isinstance(b, tuple):
        for x, y in zip(a, b, strict=False):
            if not isinstance(x, dict) and not isinstance(y, dict) and (order := compare(x, y)):
                return order
        return 0
    return -1 if a < b else int(a > b)


def earlier(a: Cursor, b: Cursor) -> bool:
    """Whether cursor ``a`` is before ``b`` on the same edge."""
    return compare(a, b) < 0


def detached(operator: FanIn) -> FanIn:
    """A copy with containers of its own: ``begin`` may empty those of a fan-in that is running."""
    fresh = copy.copy(operator)
    for name, value in vars(operator).items():
        mutable = isinstance(value, set | deque | bytearray)
        setattr(fresh, name, copy.copy(value) if mutable else copy_containers(value))
    return fresh
