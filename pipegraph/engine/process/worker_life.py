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
from pipegraph.engine.process.composed import Composed
from pipegraph.engine.process.exceptions import Carried
from pipegraph.engine.process.sealed import unseal
from pipegraph.engine.process.wire import Port, Unreadable
from pipegraph.engine.process.worker import ANSWERED, NOTHING, OperatorCounts, Page, ProcessWorker
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


def main(sock: socket.socket, page_fd: int, stack_fd: int, sealed_fd: int) -> None:
    """Main function, called in the process that the zygote forked, with the zygote's signal handlers."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(stack_fd)  # for faults, and SIGABRT, with which the trainer ends a hanging process
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
            _answer(port, Carried(error), {})
            return
        _answer(port, None, counts.take())
        _serve(port, page, worker, counts, context.stage)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the trainer has died


def _serve(port: Port, page: Page, worker: ProcessWorker, counts: OperatorCounts, stage: str) -> None:
    name, process = "", os.getpid()
    worker.send = lambda result: _answer(port, result, {})
    signal.signal(signal.SIGURG, worker.hurry)  # which does nothing where nobody handles it
    while name != "close":
        page.enter(0, NOTHING)
        try:
            name, args = port.receive()
        except Unreadable as bad:
            bad.error.add_note("pipegraph: what the stage was given cannot be read in its process")
            _answer(port, Carried(bad.error), {})
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
            _answer(port, result, counts.take())
        del result


def _answer(port: Port, result: Any, counts: dict[Any, int]) -> None:
    try:
        port.send((result, counts))
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        error.add_note("pipegraph: what the function returned cannot be sent from its process")
        port.send((Carried(error), counts))
