"""The body of a child: it opens the operator of its stage and serves the trainer's calls."""

from __future__ import annotations

import faulthandler
import resource
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pipegraph import torch_modes
from pipegraph.bundle import Pack
from pipegraph.contracts import Context
from pipegraph.engine.remote.contract import Unreadable
from pipegraph.engine.remote.exceptions import Carried
from pipegraph.engine.remote.worker import NOTHING, OperatorCounts, Page, ProcessWorker, unsent
from pipegraph.errors import note
from pipegraph.global_generators import enter_worker, own_process


def _share(shared: dict[str, object], name: str, make: Callable[[], object]) -> object:
    """As ``Context.share``."""
    return shared[name] if name in shared else shared.setdefault(name, make())


def opened_worker(
    page: Any,
    unsealed: Callable[[], object],
    context: Context,
    pack: Pack | None,
    counts: OperatorCounts,
    allocate: Callable[[int], object] | None = None,
) -> ProcessWorker:
    """The worker of a stage, opened; see ``ProcessWorker``.

    Args:
        page: records which row is in work.
        unsealed: unpickles the operator.
        allocate: makes memory that is sent without a copy.
    """
    own_process()
    torch_modes.leave()  # of the trainer's thread that this process was forked in
    enter_worker(context.seed, context.stage)
    operator = unsealed()
    context.count, context.allocate = counts.add, allocate
    context.share = partial(_share, {})
    return ProcessWorker(page, operator, context, pack)


def write_stacks(fd: int) -> None:
    """Write Python's stack to a file, instead of a core dump, in a fault or when the trainer ends a hanging process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(fd)


def called(worker: ProcessWorker | None, name: str, args: Sequence[object]) -> object:
    """What a method of the worker returns, or the exception that it raised."""
    try:
        return getattr(worker, name)(*args)
    except BaseException as error:
        return Carried(error)


def serve(port: Any, page: Page, worker: ProcessWorker, counts: OperatorCounts) -> None:
    """Serve the trainer's calls of ``worker``'s methods, until ``close``."""
    name = ""
    while name != "close":
        page.begin(NOTHING)
        try:
            name, args = port.receive()
        except Unreadable as bad:
            bad.error.add_note("pipegraph: what the stage was given cannot be read in its process")
            answer(port, Carried(bad.error), {})
            continue
        page.begin(0)
        result = called(worker, name, args)
        del args
        answer(port, result, counts.take())
        del result


def answer(port: Any, result: object, counts: Mapping[str, int]) -> None:
    """Answer a message, or say why the result cannot be sent."""
    try:
        port.send((result, counts))
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        error.add_note("pipegraph: what the function returned cannot be sent from its process")
        try:
            port.send((unsent(result, error), counts))
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as again:  # no more files may be open, or no memory is left
            note(again, "pipegraph: what was made cannot be sent from its process")
            port.send((Carried(again), counts))
