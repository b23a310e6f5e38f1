"""The proxy of each kind of remote operator; see ``base_proxy``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partialmethod
from typing import Any

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator
from pipegraph.engine.remote.base_proxy import Deaths, Remote
from pipegraph.engine.remote.contract import Call, Died, Overdue
from pipegraph.engine.remote.exceptions import Carried
from pipegraph.engine.remote.host import Host
from pipegraph.errors import StageTimeoutError, WorkerDiedError


class RemoteMap(Remote):
    """The proxy of a one-to-one operator or filter."""

    def call_for(self, chunk: Chunk) -> Call | None:
        return "process", chunk

    def process(self, chunk: Chunk) -> Any:
        made, error = self._call("process", chunk)
        if error is not None:
            raise error.error()
        return made

    def work_into(self, made: list[Any], bundle: Bundle, start: int) -> None:
        """Append the results for a bundle's rows, until one fails."""
        self._extend(made, "work", bundle, start, len(bundle.lineages))


class RemoteRows(RemoteMap):
    """The proxy of a ``RowOperator``: one process does a whole batch; each row still has its own error."""

    _chunk: Any = None
    _without: dict[int, Any]
    _again: list[int]

    def rows(self, chunk: Chunk) -> tuple[Any, dict[int, BaseException]]:
        """All rows of a batch: ``(the batch, {})``, or ``(None, the errors by row)``; then :meth:`row`, :meth:`end`."""
        self._chunk, self._without, self._again = chunk, {}, []
        made, failed = self._rows()
        if made is None:
            self._without = failed
        return made, {row: error.error() for row, error in failed.items()}

    def _rows(self) -> tuple[Any, dict[int, Any]]:
        deaths = Deaths()
        without = dict(self._without)
        last = len(self._chunk.row_lineages) - 1
        while True:
            try:
                made, failed = self._host.call("rows", self._chunk, without)
                for index in self._again:
                    self._host.call("row", index)
                return made, failed
            except Died as died:
                row = min(died.row, last)
                if deaths.blamed(row):
                    without[max(row, 0)] = Carried(self._blame(died))
            except Overdue as late:
                without[min(max(late.row, 0), last)] = Carried(self._late(late))

    def row(self, index: int) -> None:
        """Do one row again."""
        try:
            self._host.call("row", index)
        except Died as died:
            self._rows()
            raise self._blame(died) from None
        except Overdue as late:
            self._rows()
            raise self._late(late) from None
        self._again.append(index)

    def end(self, kept: Sequence[int]) -> Chunk:
        made: Chunk = self._call("end", list(kept), anew=self._rows)
        return made


class RemoteExpand(Remote):
    """The proxy of an expanding operator."""

    def process(self, chunk: Chunk) -> Iterator[Chunk]:
        """The children of a chunk; after a death the new process skips those already yielded."""
        return self._pulled(lambda done: ("expand", chunk, done), 0)


class RemoteSource(Remote):
    """The proxy of a source. Orders and samplers run in the trainer, which makes the positions."""

    def __init__(self, host: Host, operator: Any, stage: str, timeout_s: float | None) -> None:
        super().__init__(host, operator, stage, timeout_s)
        self.index_of, self._blocks = operator.index_of, operator.traits.blocks
        self._restored: Any = None
        self._run: tuple[int, tuple[tuple[int, int], ...]] = 0, ()
        self._notified = 0  # children that had ended when one was notified of the run
        self._prepared: tuple[Any, int, Sequence[Any]] | None = None  # indices for the next position

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

    def call_for(self, chunk: Chunk) -> Call | None:
        indices = self.indices_of([chunk.data], chunk.epoch)
        self._prepared = chunk.data, chunk.epoch, indices
        return "read", indices, 0, 1

    def read(self, position: Any, epoch: int) -> Any:
        found: list[Any] = []
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] is position and prepared[1] == epoch:
            indices = prepared[2]
        else:
            indices = self.indices_of([position], epoch)
        self.read_into(found, indices, 0)
        return found[0]

    def indices_of(self, positions: Sequence[Any], epoch: int) -> Sequence[Any]:
        """Computed in the trainer, where samplers draw; ``(position, epoch)`` for a source that reads one at a time."""
        if not self._blocks:
            return [(position, epoch) for position in positions]
        found: Sequence[Any] = self._operator.indices_of(positions, epoch)
        return found

    def positions_of(self, steps: range, epoch: int, rank: int, world_size: int) -> Iterable[int]:
        found: Iterable[int] = self._operator.positions_of(steps, epoch, rank, world_size)
        return found

    def read_into(self, found: list[Any], indices: Sequence[Any], start: int) -> None:
        self._extend(found, "read", indices, start, len(indices))

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[tuple[int, Any]]:
        """``(position, item)`` from step ``start`` on; after a death the new process continues at the next step."""
        restored, self._restored = self._restored, None

        def begin(step: int) -> Call:
            anew, self._notified = self._notified != self._host.ended, self._host.ended
            return "iterate", epoch, rank, world_size, step, restored, self._run if anew else None

        return self._pulled(begin, start)

    def snapshot(self) -> Any:
        """The snapshot sent with the last items; at multiples of ``PULL`` it is the current one."""
        return self._snapshot

    def restore(self, step: int, snapshot: Any) -> None:
        self._restored = (step, snapshot)


class RemoteHolder(Remote):
    """The proxy of an operator that holds data between calls: it regroups, or keeps a state."""

    failing: Sequence[Chunk] = ()
    spent = None  # operators with ``spent`` are not portable

    def _regroup(self, name: str, *args: Any) -> Any:
        made, error, self.failing = self._keep(name, *args, by="regroup")
        if error is not None:
            raise error.error()
        return made

    def _keep(self, name: str, *args: Any, by: str = "invoke") -> Any:
        error: WorkerDiedError | StageTimeoutError
        try:
            return self._host.call(by, name, *args)
        except Died as died:
            error = self._blame(died)
        except Overdue as late:
            error = self._late(late)
        error.add_note(
            f"pipegraph: what the operator held is lost with its {self._host.place}; resume from a state"
        )
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    begin = partialmethod(_keep, "begin")
    process = partialmethod(_regroup, "process")
    flush = partialmethod(_regroup, "flush")
    resume = partialmethod(_keep, "resume")
    state_dict = partialmethod(_keep, "state_dict")
    load_state_dict = partialmethod(_keep, "load_state_dict")


def remote(operator: Any, host: Host, stage: str, timeout_s: float | None) -> Any:
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
