"""Locks that survive a fork: the thread that held one is not in the child to release it."""

from __future__ import annotations

import os
import threading
import weakref

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def lock_free_after_fork() -> threading.Lock:
    """A lock that a forked child finds free, for what it shares with its parent: modules' tables, graphs' memos.

    What it guards must be readable wherever its holder may have been.
    """
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def _after_fork() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_after_fork)
