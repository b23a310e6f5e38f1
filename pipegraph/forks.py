"""Locks that outlive a fork: the thread that held one is not in the child to release it."""

from __future__ import annotations

import os
import threading


def module_lock() -> threading.Lock:
    """A lock that lives as long as its module; a forked child finds it free, as it does those of ``threading``.

    What it guards must be readable wherever its holder may have been.
    """
    lock = threading.Lock()
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock
