"""What a worker process takes over from the trainer as it is when the worker starts.

The process that forks workers may be as old as the trainer, which has changed its folder, its environment, its
``sys.path`` or its output since.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import socket
import sys
from collections.abc import Iterator

from pipegraph.engine.process.segments import anonymous_file

DESCRIPTORS = 4
"""How many :func:`taken` gives."""


def fill_standard_descriptors() -> None:
    """Open /dev/null as each of the descriptors 0, 1 and 2 that is closed, as in a daemon.

    Else the next files and sockets would get these numbers: what is printed would be written to them, and a worker
    would take them for its output.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


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
        yield [facts, folder, *(keep(os.dup(fd)) for fd in (1, 2))]


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


def socket_pair(kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
    """Connected sockets of our own, which wait without an end whatever ``socket.setdefaulttimeout`` was given."""
    pair = socket.socketpair(socket.AF_UNIX, kind)
    for end in pair:
        end.settimeout(None)
    return pair


def socket_of(fd: int) -> socket.socket:
    """The socket of a descriptor that this process was given; as those of :func:`socket_pair`."""
    sock = socket.socket(fileno=fd)
    sock.settimeout(None)
    return sock
