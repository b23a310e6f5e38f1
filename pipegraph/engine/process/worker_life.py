"""Main function of a worker process."""

from __future__ import annotations

import contextlib
import socket
from functools import partial

from pipegraph.engine.process.sealed import unseal
from pipegraph.engine.process.wire import Port
from pipegraph.engine.remote.child import answer, opened_worker, serve, write_stacks
from pipegraph.engine.remote.exceptions import Carried
from pipegraph.engine.remote.worker import OperatorCounts, Page


def main(sock: socket.socket, page_fd: int, stack_fd: int, sealed_fd: int, *shared: int) -> None:
    """Called in the process that the zygote forked, with the zygote's signal handlers. Opens what the first message
    says, and serves the calls that follow."""
    write_stacks(stack_fd)
    port, page, counts = Port(sock, back=True), Page(page_fd), OperatorCounts()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the trainer has died
        spans, context, pack = port.receive()
        try:
            worker = opened_worker(
                page, partial(unseal, sealed_fd, spans, shared), context, pack, counts, port.slab
            )
        except BaseException as error:
            answer(port, Carried(error), {})
            return
        answer(port, None, counts.take())
        serve(port, page, worker, counts)
