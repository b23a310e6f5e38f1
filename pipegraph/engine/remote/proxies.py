"""The proxy of each kind of remote operator; see ``base_proxy``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partialmethod
from typing import Any

from pipegraph.bundle import UNNAMED, Bundle, filled
from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator, Source
from pipegraph.engine.remote.base_proxy import Deaths, Remote
from pipegraph.engine.remote.contract import NOTHING, Call, Died, Overdue
from pipegraph.engine.remote.host import Host
from pipegraph.engine.remote.worker import Pulled
from pipegraph.engine.stage.failure_policy import Outcome
from pipegraph.errors import StageTimeoutError, WorkerDiedError


class _InWork:
    """A block, and what became of its rows so far.

    Attributes:
        given: what its process is given.
        first: the call for all of its rows; None once that was sent.
        done: the row behind those that were done.
        late: rows that have passed their deadline.
        without: rows of a batch that are left out.
        alone: whether its rows are sent one by one, because one of them cannot be sent.
    """

    def __init__(self, block: Any, name: str, given: Any) -> None:
        self.block, self.given = block, given
        self.first: Call | None = Call(name, given, 0, block.count)
        self.done = 0
        self.deaths = Deaths()
        self.late: dict[int, Overdue] = {}
        self.without: set[int] = set()
        self.alone = False


class RemoteMap(Remote):
    """The proxy of an operator that does each row by itself."""

    _name = "work"
    _in_work: _InWork | None = None

    def __init__(self, host: Host, operator: Any, stage: str, timeout_s: float | None) -> None:
        super().__init__(host, operator, stage, timeout_s)
        self._begun: deque[_InWork] = deque()
        self._look: Callable[[], None] = lambda: None

    def look_ahead(self, look: Callable[[], None]) -> None:
        """Call ``look`` for each block once it was sent: it may :meth:`begin` the next one."""
        self._look = look
        self._begun.clear()  # of a run that was cancelled

    def begin(self, block: Chunk) -> None:
        """Send a block of which all rows will be done after those of the block in work."""
        found = self._prepared(block)
        self._begun.append(found)
        assert found.first is not None
        self._host.ahead(found.first)

    def _prepared(self, block: Chunk) -> _InWork:
        return _InWork(block, self._name, block)

    def _sent(self, block: Chunk) -> _InWork:
        while any(each.block is block for each in self._begun):
            if (found := self._begun.popleft()).block is block:
                return found
        return self._prepared(block)

    def do(self, block: Chunk, at: int) -> Outcome:
        """Do rows of a block. Those that a death has lost are done again; the row that was in work when two processes
        died, or that passed its deadline, has failed."""
        try:
            now = self._in_work
            if now is None or now.block is not block:
                now = self._in_work = self._sent(block)
            outcome = self._rows(now, at)
        except BaseException as error:
            return (), error
        now.done = at + len(outcome[0])
        return outcome

    def _rows(self, now: _InWork, at: int) -> Outcome:
        stop: int = now.block.count
        while at not in now.late:
            stop = at + 1 if now.alone else stop
            try:
                found, error, names = self._host.answer(self._call_for(now, at, stop))
            except Died as died:
                # Its page may be that of the row before or after.
                row = NOTHING if died.row < 0 else min(max(died.row, at), stop - 1)
                if now.deaths.blamed(row):
                    return (), self._blame(died)
                if row >= 0:  # those before it were lost with the process: do them again, then go on
                    stop = max(row, at + 1)
            except Overdue as overdue:
                row = min(max(overdue.row, at), stop - 1)
                now.late[row] = overdue
                stop = max(row, at + 1)
            except Exception as error:  # one of the rows, or its result, cannot be sent
                if now.alone or now.block.count == 1:
                    return (), error
                now.alone = True
            else:
                if names is not None:  # of samples that its process has made
                    known = now.given.names or [UNNAMED] * now.block.count
                    now.given.names = [*known[:at], *names, *known[at + len(names) :]]
                if found.__class__ is not list and len(found) < now.block.count:
                    found = found.rows()
                return found, None if error is None else error.error()
        return (), self._late(now.late.pop(at))

    def _call_for(self, now: _InWork, at: int, stop: int) -> Call:
        """The call for some of the rows."""
        call, now.first = now.first, None
        if now.alone:
            given = now.given
            single = given.part(at, stop) if isinstance(given, Bundle) else given[at:stop]
            return Call(self._name, single, 0, 1)
        if call is not None and (at, stop) == (0, now.block.count):
            self._host.begin(call)
            self._look()
            return call
        return Call(self._name, now.given, at, stop)


class RemoteRows(RemoteMap):
    """The proxy of a ``RowOperator``: one process does a whole batch. After a death the next one begins it anew."""

    _in_work: Any
    _began = 0  # children that had ended when one last began a batch

    def begin_batch(self, chunk: Chunk) -> None:
        self._call("begin_batch", chunk)
        self._began = self._host.ended

    def _prepared(self, block: Any) -> _InWork:
        return (
            super()._prepared(block) if isinstance(block, Chunk) else _InWork(block, "rows", block.of.chunk)
        )

    def _call_for(self, now: _InWork, at: int, stop: int) -> Call:
        if isinstance(now.block, Chunk):
            return super()._call_for(now, at, stop)
        now.without.update(range(now.done, at))
        first = at
        if self._began != self._host.ended:
            self.begin_batch(now.given)
            first = 0  # those that were done are lost
        # A death or a deadline in ``do_rows`` is no row's: it is called if there was no death, and is no deadline.
        at_once = not at and not now.deaths and self._timeout_s is None
        return Call("rows", at_once, first, at, stop, now.without)

    def end_batch(self, batch: None, kept: Sequence[int]) -> Chunk:
        rows, deaths = self._in_work, Deaths()
        rows.without = set(range(rows.block.count)) - set(kept)
        while True:
            with suppress(Died):
                if self._began != self._host.ended:
                    self._once(self._call_for(rows, rows.block.count, rows.block.count), deaths)
                made: Chunk = self._once(Call("end", list(kept)), deaths)
                return made


class RemoteExpand(Remote):
    """The proxy of an expanding operator."""

    def expand_all(self, parents: Bundle) -> Any:
        """The children of the first chunks, in one call: ``Expanded``; None where each has to be asked for alone."""
        with suppress(Exception):  # of one of them
            return self._host.answer(Call("expand_all", parents))
        return None

    def children(self, parent: Chunk, start: int, first: Pulled | None = None) -> Iterator[Chunk]:
        """The children of a chunk from one on; after a death the new process begins at the next one."""
        return self._pulled(lambda done: Call("expand", parent, done), start, first)


class RemoteSource(RemoteMap):
    """The proxy of a source. Orders and samplers run in the trainer, which makes the positions."""

    _name = "read"

    def __init__(self, host: Host, operator: Any, stage: str, timeout_s: float | None) -> None:
        super().__init__(host, operator, stage, timeout_s)
        self.index_of, self._blocks = operator.index_of, operator.traits.blocks
        self._restored: tuple[int, object] | None = None
        self._run: tuple[int, tuple[tuple[int, int], ...]] = 0, ()
        self._notified = 0  # children that had ended when one was notified of the run

    def open(self, context: Context) -> None:
        """Open the operator in the trainer too, to look up positions."""
        self._operator.open(context)
        super().open(context)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._operator.close()

    def cancel(self) -> None:
        self._operator.cancel()
        super().cancel()

    def uncancel(self) -> None:
        self._operator.uncancel()
        super().uncancel()

    def begin_run(self, epoch: int, history: tuple[tuple[int, int], ...]) -> None:
        self._operator.begin_run(epoch, history)
        if not self._operator.random_access:
            self._run = epoch, history
            self._call("invoke", "begin_run", *self._run)
            self._notified = self._host.ended

    def _prepared(self, block: Chunk) -> _InWork:
        """Its indices are computed in the trainer, where samplers draw; ``(position, epoch)`` for a source that reads
        one at a time."""
        positions = block.data if isinstance(block, Bundle) else [block.data]
        if not self._blocks:
            return _InWork(block, self._name, [(position, block.epoch) for position in positions])
        return _InWork(block, self._name, self._operator.indices_of(positions, block.epoch))

    def do(self, block: Chunk, at: int) -> Outcome:
        """Read the positions of a block from one on."""
        made, error = super().do(block, at)
        if made and not isinstance(block, Bundle):
            return (filled(block, made[0]),), error
        return made, error

    def positions_of(self, steps: range, epoch: int, rank: int, world_size: int) -> Iterable[int]:
        found: Iterable[int] = self._operator.positions_of(steps, epoch, rank, world_size)
        return found

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[object]:
        """``(position, item)`` from step ``start`` on; after a death the new process continues at the next step."""
        restored, self._restored = self._restored, None

        def begin(step: int) -> Call:
            anew, self._notified = self._notified != self._host.ended, self._host.ended
            return Call("iterate", epoch, rank, world_size, step, restored, self._run if anew else None)

        return self._pulled(begin, start)

    def snapshot(self) -> object:
        """The snapshot sent with the last items; at multiples of ``PULL`` it is the current one."""
        return self._snapshot

    def restore(self, step: int, snapshot: object) -> None:
        self._restored = (step, snapshot)


class RemoteHolder(Remote):
    """The proxy of an operator that holds data between calls: it regroups, or keeps a state."""

    failing: Sequence[Chunk] = ()
    spent = None  # operators with ``spent`` are not portable

    def _regroup(self, name: str, *args: object) -> object:
        made, error, self.failing = self._keep(name, *args, by="regroup")
        if error is not None:
            raise error.error()
        return made

    def _keep(self, name: str, *args: object, by: str = "invoke") -> Any:
        try:
            return self._once(Call(by, name, *args), None)
        except (WorkerDiedError, StageTimeoutError) as error:
            error.add_note(
                f"pipegraph: what the operator held is lost with its {self._host.place}; resume from a state"
            )
            raise

    begin = partialmethod(_keep, "begin")
    process = partialmethod(_regroup, "process")
    flush = partialmethod(_regroup, "flush")
    resume = partialmethod(_keep, "resume")
    state_dict = partialmethod(_keep, "state_dict")
    load_state_dict = partialmethod(_keep, "load_state_dict")


def remote(operator: Operator | Source, host: Host, stage: str, timeout_s: float | None) -> Remote:
    """The proxy for an operator in ``host``."""
    kinds: dict[str, type[Remote]] = {
        "source": RemoteSource,
        "map": RemoteMap,
        "rows": RemoteRows,
        "expand": RemoteExpand,
    }
    kind = kinds.get(operator.kind, RemoteHolder)
    if isinstance(operator, Operator) and operator.stateful:
        kind = RemoteHolder
    return kind(host, operator, stage, timeout_s)
