"""A worker of a stage: its opened copy of the operator, and its counters. Lives as long as the loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipegraph import concurrency
from pipegraph.engine.meter import Meter

if TYPE_CHECKING:
    from pipegraph.engine.run import Run

Loop = Iterator[Any]
"""The loop of a worker in a run. It yields where a unit of work has ended: None, or one of the two below."""

HALFWAY = object()
"""The worker cannot leave here: it is in the middle of an item, or has taken the next one ahead."""

MORE = object()
"""The next step of the loop will not block."""


@dataclass(eq=False, repr=False)
class Worker:
    """A worker of a stage.

    Attributes:
        meter: its counters.
        ticket: of the item that it has taken.
        whole: whether its last block was done in one go, without a failure.
        ready: whether it takes part: its operator is open, and it has not begun to leave.
        late: whether the first run does not wait for it: a tuner has added it, or its backend lets the first worker of
            each stage go before the others (``joins_late``). It joins the run that it finds, once it is open.
        leaves: whether it ends after its current unit of work.
        thread: None for that of an inline stage.
        run: the run that its thread is in.
        initial: the state with which a stateful operator starts each epoch.
    """

    index: int
    operator: Any
    meter: Meter = field(default_factory=Meter)
    ticket: int = 0
    whole: bool = True
    ready: bool = False
    late: bool = False
    leaves: bool = False
    thread: concurrency.Thread | None = None
    run: Run | None = None
    initial: object = None
