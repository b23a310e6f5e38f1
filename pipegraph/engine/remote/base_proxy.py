"""The proxy, in a worker's thread, of an operator that runs in a process or in a Ray actor.

It has the operator's methods that the stage's loops call, and no others: tickets, order, memory, policies, cursors and
states stay in the trainer and are not affected. It also handles deaths: work that can be repeated is sent to a new
process; a row that was in work when two processes died is blamed; if the operator held data that is lost with the
process, the run ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from pipegraph.contracts import Context
from pipegraph.engine.remote.contract import Call, Died, Overdue
from pipegraph.engine.remote.host import Host
from pipegraph.engine.remote.worker import PULL, Pulled
from pipegraph.errors import StageTimeoutError, WorkerDiedError

TRIES = 2
"""Number of processes that die with a row in work until the row is blamed."""

IDLE_TRIES = 5
"""Number of processes that die with no row in work until the first waiting row is blamed."""


class Deaths(Counter[int]):
    """Counts the processes that died with each row of a call in work."""

    def blamed(self, row: int) -> bool:
        """Count a death with this row in work (negative: none); returns whether the row is to blame."""
        self[row] += 1
        return self[row] >= (TRIES if row >= 0 else IDLE_TRIES)


class Remote:
    """Base class of the proxies: starts and ends the host, and makes the errors for deaths.

    ``operator`` is the plan's own, used only for attributes and for what is computed in the trainer; ``stage`` and
    ``timeout_s`` are for messages.
    """

    _snapshot: object = None  # that came with the last items of ``_pulled``

    def __init__(self, host: Host, operator: Any, stage: str, timeout_s: float | None) -> None:
        self._host = host
        self._operator = operator
        self._stage = stage
        self._timeout_s = timeout_s
        self.kind = operator.kind

    @property
    def pid(self) -> int | None:
        return self._host.pid

    def open(self, context: Context) -> None:
        try:
            self._host.start()
        except Died as died:
            self._host.close(0)
            raise self._blame(died) from None
        except BaseException:
            self._host.close(0)
            raise

    def close(self) -> None:
        self._host.close()

    def cancel(self) -> None:
        self._host.cancel()

    def uncancel(self) -> None:
        self._host.uncancel()

    def _blame(self, died: Died) -> WorkerDiedError:
        error = WorkerDiedError(f"stage {self._stage!r}: the worker's {self._host.place} {died.reason}")
        error.pid, error.status = died.pid, died.status
        if died.stack:
            error.add_note(f"pipegraph: it stood at\n{died.stack}")
        return error

    def _late(self, late: Overdue) -> StageTimeoutError:
        error = StageTimeoutError(
            f"stage {self._stage!r}: an item took longer than timeout={self._timeout_s:g} s; "
            f"{self._host.gave_up}"
        )
        error.add_note(f"pipegraph: it stood at\n{late.stack}")
        return error

    def _once(self, call: Call, deaths: Deaths | None) -> Any:
        """The answer to a call that makes one thing.

        Raises:
            Died: it may be repeated, in a new process.
            WorkerDiedError: it is to blame for these ``deaths``, or nothing can be repeated (None).
            StageTimeoutError: it took too long.
        """
        try:
            return self._host.answer(call)
        except Died as died:
            if deaths is None or deaths.blamed(min(died.row, 0)):
                raise self._blame(died) from None
            raise
        except Overdue as late:
            raise self._late(late) from None

    def _call(self, name: str, *args: object) -> object:
        """A call that is repeated in a new process after a death."""
        deaths = Deaths()
        while True:
            with suppress(Died):
                return self._once(Call(name, *args), deaths)

    def _pulled(self, begin: Callable[[int], Call], start: int, first: Pulled | None = None) -> Iterator[Any]:
        """The items that a call makes one after the other, from number ``start`` on; after a death a new process begins
        at the next one. ``begin(n)`` is the call that begins at number n; ``first``: its answer, if it is there."""
        done, deaths, call = start, Deaths(), begin(start)
        while True:
            try:
                items, ended, error, self._snapshot = first or self._once(call, deaths)
            except Died:
                call = begin(done)
                continue
            first = None
            deaths.clear()
            done += len(items)
            yield from items
            if error is not None:
                raise error.error()
            if ended:
                return
            call = Call("more", PULL - done % PULL)
