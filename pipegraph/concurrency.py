"""Locks, events, threads and deadlines: the one place from which the packages take them.

In production these are the standard library's own objects, taken when they are made, so they cost nothing more. A test
replaces the names of this module while it runs, and so holds the scheduler of everything that is made meanwhile
(``docs/schedules.md``). Hence they are always written ``concurrency.Lock()``, never imported by name.
"""

from __future__ import annotations

from _thread import start_new_thread as start_new_thread
from queue import Empty as Empty, SimpleQueue as SimpleQueue
from threading import (
    Condition as Condition,
    Event as Event,
    Lock as Lock,
    RLock as RLock,
    Thread as Thread,
    active_count as active_count,
    current_thread as current_thread,
    enumerate as enumerate,
    get_ident as get_ident,
    get_native_id as get_native_id,
    local as local,
    main_thread as main_thread,
)
from time import monotonic as monotonic, monotonic_ns as monotonic_ns
