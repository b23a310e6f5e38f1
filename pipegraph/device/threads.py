"""Threads with their own intra-op thread count.

``torch.set_num_threads`` sets the calling thread's width, which is wanted here,
*and* the width with which threads started later begin, which is not. Running threads
keep theirs. (Observed with torch 2.13 and OpenMP; ``at::set_num_threads``.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipegraph import concurrency
from pipegraph.forks import lock_free_after_fork

_lock = lock_free_after_fork()


def start_thread(target: Callable[[], object], name: str, intra_op: int = 1) -> concurrency.Thread:
    """Start a daemon thread whose tensor operations use `intra_op` threads. Who calls it ends the thread."""

    def run() -> None:
        with _lock:
            # Read before set: a thread's first use takes the process's width, over any set before it.
            process_width = torch.get_num_threads()
            torch.set_num_threads(intra_op)
            restore = concurrency.Thread(
                target=torch.set_num_threads, args=(process_width,), name="pipegraph-width", daemon=True
            )
            restore.start()
            restore.join()
        target()

    thread = concurrency.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
