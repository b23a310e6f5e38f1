"""Main function of a worker process: opens the operators of its stage, or fused stages, and serves calls."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pipegraph.contracts import Context
from pipegraph.engine.process.sealed import unseal
from pipegraph.engine.process.wire import Port, Unreadable
from pipegraph.engine.remote.composed import Composed
from pipegraph.engine.remote.exceptions import Carried
from pipegraph.engine.remote.worker import ANSWERED, NOTHING, OperatorCounts, Page, ProcessWorker
from pipegraph.forks import end_stray
from pipegraph.global_generators import enter_worker, own_process


def _share(shared: dict[str, Any], name: str, make: Callable[[], Any]) -> Any:
    """As ``Context.share``."""
    return shared[name] if name in shared else shared.setdefault(name, make())


def opened_worker(
    page: Any,
    operators: Sequence[Any],
    contexts: Sequence[Context],
    pack: Any,
    single: bool,
    counts: OperatorCounts,
    allocate: Callable[[int], Any] | None = None,
) -> ProcessWorker:
    """A worker for one stage or for several fused ones, opened; see ``ProcessWorker`` and ``Composed``."""
    for member, each in enumerate(contexts):
        each.count, each.allocate = partial(counts.add, member), allocate
        each.share = partial(_share, {})
    operator = operators[0] if len(operators) == 1 else Composed(operators, contexts, page, single)
    return ProcessWorker(page, operator, contexts[0], Carried, pack)


def write_stacks(fd: int) -> None:
    """Write Python's stack to a file, instead of a core dump, in a fault or when the trainer ends a hanging process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(fd)


def main(sock: socket.socket, page_fd: int, stack_fd: int, sealed_fd: int) -> None:
    """Main function, called in the process that the zygote forked, with the zygote's signal handlers."""
    write_stacks(stack_fd)
    port, page = Port(sock), Page(page_fd)
    try:
        spans, (context, pack, others, single) = port.receive()
        own_process()
        enter_worker(context.seed, context.stage)
        try:
            counts = OperatorCounts()
            operators, contexts = unseal(sealed_fd, spans), (context, *others)
            worker = opened_worker(page, operators, contexts, pack, single, counts, port.slab)
        except BaseException as error:
            answer(port, Carried(error), {}, cannot_be_sent)
            return
        answer(port, None, counts.take(), cannot_be_sent)
        worker.send = lambda made: answer(port, made, {}, cannot_be_sent)
        signal.signal(signal.SIGURG, worker.hurry)  # which does nothing where nobody handles it
        serve(port, page, worker, counts, context.stage, cannot_be_sent)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the trainer has died


def serve(
    port: Port,
    page: Page,
    worker: Any,
    counts: OperatorCounts,
    stage: str,
    instead: Callable[[Any, Exception], Any],
) -> None:
    """Serve the trainer's calls of ``worker``'s methods, until ``close``.

    Args:
        instead: what to answer in place of a result that cannot be sent, and the error.
    """
    name, process = "", os.getpid()
    while name != "close":
        page.enter(0, NOTHING)
        try:
            name, args = port.receive()
        except Unreadable as bad:
            bad.error.add_note("pipegraph: what the stage was given cannot be read in its process")
            answer(port, Carried(bad.error), {}, cannot_be_sent)
            continue
        page.begin(0)
        call: Callable[..., Any] = getattr(worker, name)
        try:
            result = call(*args)
        except BaseException as error:
            result = Carried(error)
        del args
        end_stray(process, stage)
        if result is not ANSWERED:
            answer(port, result, counts.take(), instead)
        del result


def answer(port: Port, result: Any, counts: dict[Any, int], instead: Callable[[Any, Exception], Any]) -> None:
    try:
        port.send((result, counts))
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        port.send((instead(result, error), counts))


def cannot_be_sent(result: Any, error: Exception) -> Carried:
    error.add_note("pipegraph: what the function returned cannot be sent from its process")
    return Carried(error)
