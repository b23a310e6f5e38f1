"""Torch's modes of the training loop's thread: gradients, inference mode, autocast, the default device.

Worker threads have none of them. Stages that run in the loop's thread, or in a process that was forked from it, do
without them too: else the backend would decide a stage's data.

And with how many threads torch computes in threads of ours: one, as in ``DataLoader``'s workers, else each worker has
a pool of as many as there are cores, which wait for each other.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from pipegraph import concurrency
from pipegraph.forks import lock_free_after_fork

_NO_DEVICE = nullcontext()
_left: ExitStack | None = None


def without() -> tuple[Any, Any, AbstractContextManager[Any]]:
    """Contexts for one ``with``, in which this thread has the modes of a new one.

    Entered and left in C: Ctrl-C between the two cannot leave the training loop's thread inside.
    """
    device = torch.device("cpu") if torch._C._len_torch_function_stack() else _NO_DEVICE
    return (
        torch._C._InferenceMode(False),
        torch._C._DisableAutocast(),
        device,
    )  # the first turns gradients on too


def leave() -> None:
    """As :func:`without`, for the rest of a process."""
    global _left
    _left = ExitStack()
    for each in without():
        _left.enter_context(each)


def back() -> None:
    """Undo :func:`leave`."""
    if _left is not None:
        _left.close()


_width_lock = lock_free_after_fork()


def narrow(width: int = 1) -> None:
    """The calling thread's tensor operations use ``width`` threads from now on.

    ``torch.set_num_threads`` sets the calling thread's width, which is wanted here, *and* the width with which threads
    started later begin, which is not. Running threads keep theirs. (Observed with torch 2.13 and OpenMP;
    ``at::set_num_threads``.)
    """
    with _width_lock:
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
