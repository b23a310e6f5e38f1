"""With how many threads torch computes in threads of ours: one, as in ``DataLoader``'s workers, else each worker has
a pool of as many as there are cores, which wait for each other.

``torch.set_num_threads`` sets the calling thread's width, which is wanted here, *and* the width with which threads
started later begin, which is not. Running threads keep theirs. (Observed with torch 2.13 and OpenMP;
``at::set_num_threads``.)
"""

from __future__ import annotations

import torch

from pipegraph import concurrency
from pipegraph.forks import lock_free_after_fork

_lock = lock_free_after_fork()


def narrow(width: int = 1) -> None:
    """The calling thread's tensor operations use ``width`` threads from now on."""
    with _lock:
        # Read before set: a thread's first use takes the process's width, over any set before it.
        process_width = torch.get_num_threads()
        if width == process_width:
            return
        torch.set_num_threads(width)
        restore = concurrency.Thread(
            target=torch.set_num_threads, args=(process_width,), name="pipegraph-width", daemon=True
        )
        try:
            restore.start()
            restore.join()
        except RuntimeError:  # no more threads may be started: this one must serve all the same
            torch.set_num_threads(process_width)
