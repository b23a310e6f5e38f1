"""What a worker process takes over from the trainer as it is when the worker starts.

The process that forks workers may be as old as the trainer, which has changed its folder, its environment, its
``sys.path`` or its output since.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
from collections.abc import Iterator

from pipegraph.engine.process.segments import anonymous_file

DESCRIPTORS = 4
"""How many :func:`taken` gives."""


@contextlib.contextmanager
def taken() -> Iterator[list[int]]:
    """The present surroundings, as descriptors to send, which are closed afterwards."""
    with contextlib.ExitStack() as opened:

        def keep(fd: int) -> int:
            opened.callback(os.close, fd)
            return fd

        facts = keep(anonymous_file(0))
        with os.fdopen(facts, "wb", closefd=False) as file:
            pickle.dump((sys.path, dict(os.environ)), file)
        folder = keep(os.open(".", os.O_PATH | os.O_CLOEXEC))  # also one that was deleted
        yield [facts, folder, *(keep(_copy(fd)) for fd in (1, 2))]


def _copy(fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError:  # the trainer has closed it
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def enter(fds: list[int]) -> None:
    """Take over what :func:`taken` gave, in a worker process; closes ``fds``."""
    facts, folder, *outputs = fds
    with os.fdopen(facts, "rb") as file:
        file.seek(0)
        sys.path[:], environment = pickle.load(file)
    if environment != dict(os.environ):
        os.environ.clear()
        os.environ.update(environment)
    os.fchdir(folder)
    os.close(folder)
    for number, fd in enumerate(outputs, 1):
        os.dup2(fd, number)
        os.close(fd)
    importlib.invalidate_caches()  # of folders that did not exist when the forking process looked
