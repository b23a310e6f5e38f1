"""Cursors as values: comparing them, and reading them back from JSON. Pure."""

from __future__ import annotations

from typing import Any

from pipegraph.chunk import Cursor


def freeze(value: Any) -> Any:
    """Lists (as JSON gives them) back to tuples; dicts, which hold snapshots, stay as they are."""
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


def compare(a: Cursor, b: Cursor) -> int:
    """Below, at or above 0 as cursor ``a`` lies before, at or behind ``b`` on the same edge.

    None is the start; snapshots do not count. Each part of a cursor is looked at once, for every level of nesting is
    another part: asking twice, for before and for behind, would double the work at each level.
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
    """Whether cursor ``a`` lies before ``b`` on the same edge."""
    return compare(a, b) < 0


def same(a: Cursor, b: Cursor) -> bool:
    """Whether two cursors of one edge are the same place."""
    return compare(a, b) == 0
