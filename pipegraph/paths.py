"""Paths that users give, as text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Set
from typing import Any

from pipegraph.errors import GraphError, shown

PATHS = (str, bytes, os.PathLike)
"""The types of a single path."""

TO_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""How to open a file: at once, also a pipe that nobody writes to, and without Windows changing what is read."""


def path_of(given: Any, what: str) -> str:
    """A path or a URL as text; bytes are decoded as the file system's names are.

    Raises:
        GraphError: it is none; says ``what`` must be one.
    """
    try:
        path = str(os.fsdecode(given))  # NumPy has texts of its own
    except TypeError:
        raise GraphError(f"{what} must be a path (a str or a pathlib.Path), got {shown(given)}") from None
    if not path or "\0" in path:
        remedy = "the current folder is '.'" if not path else "no file's name has a null character"
        raise GraphError(f"{what} must be a path, got {shown(given)}; {remedy}")
    return path


def paths_of(given: Any, what: str, others: type | tuple[type, ...] = ()) -> str | list[Any]:
    """One path as text, or several as a list of texts, in the order given; a set is sorted.

    Args:
        others: types of entries that are left as they are.

    Raises:
        GraphError: it is neither, or an entry is no path.
    """
    if isinstance(given, PATHS):
        return path_of(given, what)
    if isinstance(given, others):
        return [given]
    if not isinstance(given, Iterable) or hasattr(given, "read"):  # the lines of a file are no paths
        raise GraphError(f"{what} must be a glob, a folder, a URL or a list of these, got {shown(given)}")
    found = [
        each if isinstance(each, others) else path_of(each, f"{what}: each entry of the list")
        for each in given
    ]
    # A set of texts has another order in each process.
    return sorted(found, key=str) if isinstance(given, Set) else found


def broken_link(path: str) -> str | None:
    """Where a link points that leads to nothing, or to what may not be read; None for any other path."""
    return os.readlink(path) if os.path.islink(path) and not os.path.exists(path) else None
