"""The body of a child: it opens the operators of its stage, or fused stages, and serves the trainer's calls."""

from __future__ import annotations

import faulthandler
import resource
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pipegraph import torch_modes
from pipegraph.contracts import Context
from pipegraph.engine.remote.composed import Composed
from pipegraph.engine.remote.contract import Unreadable
from pipegraph.engine.remote.exceptions import Carried
from pipegraph.engine.remote.worker import NOTHING, OperatorCounts, Page, ProcessWorker, unsent
from pipegraph.errors import note
from pipegraph.global_generators import enter_worker, own_process


def _share(shared: dict[str, Any], name: str, make: Callable[[], Any]) -> Any:
    """As ``Context.share``."""
    return shared[name] if name in shared else shared.setdefault(name, make())


def opened_worker(
    page: Any,
    unsealed: Callable[[], Sequence[Any]],
    contexts: Sequence[Context],
    pack: Any,
    single: bool,
    counts: OperatorCounts,
    allocate: Callable[[int], Any] | None = None,
) -> ProcessWorker:
    """A worker for one stage or for several fused ones, opened; see ``ProcessWorker`` and ``Composed``.

    Args:
        page: records which row is in work.
        unsealed: unpickles the operators.
        allocate: makes memory that is sent without a copy.
    """
    own_process()
    torch_modes.leave()  # of the trainer's thread that this process was forked in
    enter_worker(contexts[0].seed, contexts[0].stage)
    operators = unsealed()
    for member, each in enumerate(contexts):
        each.count, each.allocate = partial(counts.add, member), allocate
        each.share = partial(_share, {})
    operator = operators[0] if len(operators) == 1 else Composed(operators, contexts, page, single)
    return ProcessWorker(page, operator, contexts[0], pack)


def write_stacks(fd: int) -> None:
    """Write Python's stack to a file, instead of a core dump, in a fault or when the trainer ends a hanging process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(fd)


def serve(
    port: Any,
    page: Page,
    worker: Any,
    counts: OperatorCounts,
) -> None:
    """Serve the trainer's calls of ``worker``'s methods, until ``close``."""
    name = ""
    while name != "close":
        page.enter(0, NOTHING)
        try:
            name, args = port.receive()
        except Unreadable as bad:
            bad.error.add_note("pipegraph: what the stage was given cannot be read in its process")
            answer(port, Carried(bad.error), {})
            continue
        page.begin(0)
        call: Callable[..., Any] = getattr(worker, name)
        try:
            result = call(*args)
        except BaseException as error:
            result = Carried(error)
        del args
        answer(port, result, counts.take())
        del result


def answer(
    port: Any,
    result: Any,
    counts: dict[Any, int],
) -> None:
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
