"""Cursors as values: comparing them, and reading them back from JSON. Pure."""

from __future__ import annotations

from typing import Any

from pipegraph.chunk import Cursor


def freeze(value: Any) -> Any:
    """Lists (as JSON gives them) back to tuples; dicts, which hold snapshots, stay as they are."""
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


def earlier(a: Cursor, b: Cursor) -> bool:
    """Whether cursor ``a`` lies before ``b`` on the same edge; None is the start, snapshots do not count."""
    if b is None:
        return False
    if a is None:
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        for x, y in zip(a, b, strict=False):
            if isinstance(x, dict) or isinstance(y, dict):
                continue
            if earlier(x, y):
                return True
            if earlier(y, x):
                return False
        return False
    return bool(a < b)


def same(a: Cursor, b: Cursor) -> bool:
    """Whether two cursors of one edge are the same place."""
    return not earlier(a, b) and not earlier(b, a)
