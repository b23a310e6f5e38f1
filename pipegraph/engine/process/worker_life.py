"""Main function of a worker process."""

from __future__ import annotations

import contextlib
import socket
from functools import partial

from pipegraph.engine.process.sealed import unseal
from pipegraph.engine.process.wire import Port
from pipegraph.engine.remote.child import live, write_stacks
from pipegraph.engine.remote.worker import Page


def main(sock: socket.socket, page_fd: int, stack_fd: int, sealed_fd: int) -> None:
    """Called in the process that the zygote forked, with the zygote's signal handlers."""
    write_stacks(stack_fd)
    port = Port(sock)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the trainer has died
        live(port, Page(page_fd), partial(unseal, sealed_fd), port.slab)
