"""What a forked child sets right: locks, and objects whose threads or processes stayed in the parent."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from pipegraph import concurrency

_locks: weakref.WeakSet[concurrency.Lock] = weakref.WeakSet()
_notified: weakref.WeakSet[Any] = weakref.WeakSet()


def lock_free_after_fork() -> concurrency.Lock:
    """A lock that a forked child finds free, for what it shares with its parent: modules' tables, graphs' memos.

    What it guards must be readable wherever its holder may have been.
    """
    lock = concurrency.Lock()
    _locks.add(lock)
    return lock


_threads_in: int | None = None
"""The process with the threads of a library that does not work in a fork without them."""


def use_native_threads() -> bool:
    """Note that such a library is used from now on; False if that was so in a parent of this forked process."""
    global _threads_in
    _threads_in = _threads_in or os.getpid()
    return _threads_in == os.getpid()


def has_native_threads() -> bool:
    """Whether a fork of this process could not use such a library."""
    return _threads_in is not None


def notify(owner: Any) -> None:
    """Call ``owner._forked()`` in every forked child."""
    _notified.add(owner)


def _after_fork() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # type: ignore[attr-defined]
    for owner in list(_notified):
        owner._forked()


def in_child(repair: Callable[[], None]) -> None:
    """Call ``repair`` in every forked child, for as long as this process lives."""
    if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
        os.register_at_fork(after_in_child=repair)


in_child(_after_fork)
