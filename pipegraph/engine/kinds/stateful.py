"""Operators with a state, of any other kind: one worker, in order, with snapshots.

Every ``SNAPSHOT_EVERY`` inputs, and less often the more a state holds, the operator's ``state_dict()`` is taken, even
while a regrouping operator holds samples: its state contains them, as chunks (see ``kept``). Only below a
completion-order stage, where a restart handles samples one by one, does the snapshot wait until no sample is held. The
cursor of an output is ``(n, base, snapshot, drop)``: its number in the epoch, the input cursor and the snapshot to
restart from, and how many outputs to drop after that. The snapshot is wrapped in a dict, because code that handles
cursors leaves dicts alone. The state is reset at each epoch: an epoch never depends on earlier ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from pipegraph.bundle import DROPPED
from pipegraph.chunk import Chunk, Cursor, EndOfEpoch, Failure, Lineage
from pipegraph.contracts import Operator, Source
from pipegraph.engine.stage.failure_notes import checked, where
from pipegraph.engine.stage.failure_policy import ends_run
from pipegraph.engine.stage.kept import decode, encode_state
from pipegraph.engine.stage.serial import Serial, serial
from pipegraph.engine.stage.snapshots import snapshot_bytes
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Loop, Worker
from pipegraph.errors import note
from pipegraph.planning.kind import Restart, StageKind
from pipegraph.planning.plan import StagePlan

SNAPSHOT_EVERY = 64

ENTRIES_PER_INPUT = 8
"""Entries of a state that a snapshot may encode for each input since the one before: a state that grows with every
input then costs as much for each, and a restart repeats an eighth of the inputs that made it."""


class StatefulKind(StageKind):
    """See the module docstring.

    Args:
        of: the operators' kind but for the state.
    """

    keeps = True

    def __init__(self, of: StageKind) -> None:
        self.of = of
        self.by_sample = of.by_sample
        self.expands = of.expands
        self.gathers = of.gathers

    def hands_over_rows(self, stage: StagePlan) -> bool:
        return not stage.unordered_above

    def overtakes(self, operator: Operator | Source) -> bool:
        return self.of.overtakes(operator)

    def one_to_one(self, operator: Operator | Source) -> bool:
        return self.of.one_to_one(operator)

    def elastic(self, stage: StagePlan) -> bool:
        return False

    def split(self, stage: StagePlan, cursor: Cursor) -> tuple[Restart, list[Cursor]]:
        if stage.unordered_above:
            cursor = (*cursor[:3], 0)  # samples say what was delivered
        return Restart(cursor=cursor), [cursor[1]]

    def why_unknown(self, operator: object) -> str | None:
        return "it keeps a state"

    def loop(self, stage: StageRun, worker: Worker) -> Loop:
        return serial(_Keeping(stage, worker, self.of))


class _Keeping(Serial):
    """Keeps a state, besides what its kind does without one."""

    def __init__(self, stage: StageRun, worker: Worker, kind: StageKind) -> None:
        super().__init__(stage, worker)
        self._kind = kind
        self._process = stage.failures.seeded(self.operator.process)
        self._waits = kind.gathers and stage.plan.unordered_above
        self._inside: Counter[Lineage] = (
            Counter()
        )  # samples that it holds, if a snapshot waits until it holds none
        self._kept = [0, 0]  # bytes of the last two snapshots
        self._base: Cursor = None
        self._snapshot: dict[str, object] | None = None
        self._number = self._drop = self._done = 0

    def begin(self, epoch: int, cursor: Cursor) -> None:
        operator, worker = self.operator, self.worker
        begins = self.gathers and epoch == self.stage.run.first_epoch
        if begins:
            operator.begin()
        if worker.initial is None:
            worker.initial = encode_state(operator.state_dict(), self.stage.name)
        operator.load_state_dict(decode(worker.initial))
        if begins:
            operator.begin()
        number, self._base, self._snapshot, self._drop = cursor or (0, None, None, 0)
        if self._snapshot is not None:
            operator.load_state_dict(decode(self._snapshot["state"]))
        self._number = number - self._drop
        self._done, self._inputs, self._every = 0, 0, SNAPSHOT_EVERY

    def take(self, item: Chunk) -> Iterator[None]:
        after = item.after
        self.held.add(item)
        if self._waits:
            self._inside.update(item.lineages)
        made = self.made(item, partial(self._results, partial(self._process, item)))
        yield from self._send_all(made)
        self._inputs += 1
        if made or not self.gathers:
            self.account.release(self.held.leave_all())
        if self._inputs >= self._every and not self._inside:
            self._inputs = 0
            yield from self._take_snapshot(item, after)

    def end(self, end: EndOfEpoch) -> Iterator[None]:
        if self.gathers:
            flush = self.stage.failures.flushing(self.operator.flush, end.epoch)
            yield from self._send_all(self.made(end, partial(self._results, flush)))
        self._inside.clear()
        self.account.keep(-sum(self._kept))
        self._kept = [0, 0]

    def _results(self, call: Callable[[], Any]) -> list[Chunk]:
        made = call()
        if self._kind.in_place:
            made = checked(made, self.stage.plan.work, self.stage.name)
        return [made] if isinstance(made, Chunk) else [] if made is DROPPED else list(made)

    def _send_all(self, made: Sequence[Chunk | Failure]) -> Iterator[None]:
        """Send results, with their cursors, but for those that left before the restart."""
        for out in made:
            if isinstance(out, Chunk):
                if self._waits:
                    self._inside -= Counter(out.lineages)
                number, done = self._number, self._done
                self._number, self._done = number + 1, done + 1
                if done < self._drop:
                    continue
                out.before = number, self._base, self._snapshot, done
                out.after = number + 1, self._base, self._snapshot, done + 1
            self.send(out)
            yield

    def _take_snapshot(self, item: Chunk, after: Cursor) -> Iterator[None]:
        stage = self.stage
        try:
            state = encode_state(self.operator.state_dict(), stage.name)
        except BaseException as error:
            if ends_run(stage, error):
                raise
            note(error, f"pipegraph: stage {stage.name!r}, in its state_dict() at {where(item)}")
            self.send(Failure(error, item.epoch))
            yield
            return
        self._base, self._snapshot = after, {"state": state}
        self._every = max(SNAPSHOT_EVERY, _entries(state) // ENTRIES_PER_INPUT)
        # The previous snapshot is still referenced by chunks that are not delivered yet.
        self._kept.append(snapshot_bytes(self._snapshot))
        self.account.keep(self._kept[-1] - self._kept.pop(0))
        self._drop, self._done = max(0, self._drop - self._done), 0


def _entries(state: object) -> int:
    """The entries of an encoded state, at all depths."""
    within = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return len(within) + sum([_entries(each) for each in within if each.__class__ in (dict, list)])
