"""Torch's modes of the training loop's thread: gradients, inference mode, autocast, the default device.

Worker threads have none of them. Stages that run in the loop's thread, or in a process that was forked from it, do
without them too: else the backend would decide a stage's data.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

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
