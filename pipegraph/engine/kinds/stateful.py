"""Operators with a state, of any other kind: one worker, in order, with snapshots.

Every ``SNAPSHOT_EVERY`` inputs, and less often the more a state holds, the operator's ``state_dict()`` is taken, even
while a regrouping operator holds samples: its state contains them, as chunks (see ``kept``). Only below a
completion-order stage, where a restart handles samples one by one, does the snapshot wait until no sample is held. The
cursor of an output is ``(n, base, snapshot, drop)``: its number in the epoch, the input cursor and the snapshot to
restart from, and how many outputs to drop after that. The snapshot is wrapped in a dict, because code that handles
cursors leaves dicts alone. The state is reset at each epoch: an epoch never depends on earlier ones (promise 3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from pipegraph.bundle import DROPPED
from pipegraph.chunk import Chunk, Cursor, EndOfEpoch, Failure, Lineage
from pipegraph.engine.stage.failure_notes import checked, where
from pipegraph.engine.stage.failure_policy import ends_run
from pipegraph.engine.stage.hand_over import settle
from pipegraph.engine.stage.kept import decode, encode_state
from pipegraph.engine.stage.row_intake import RowIntake
from pipegraph.engine.stage.snapshots import snapshot_bytes
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Worker
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

    def overtakes(self, operator: Any) -> bool:
        return self.of.overtakes(operator)

    def one_to_one(self, operator: Any) -> bool:
        return self.of.one_to_one(operator)

    def elastic(self, stage: StagePlan) -> bool:
        return False

    def split(self, stage: StagePlan, cursor: Cursor) -> tuple[Restart, list[Cursor]]:
        if stage.unordered_above:
            cursor = (*cursor[:3], 0)  # samples say what was delivered
        return Restart(cursor=cursor), [cursor[1]]

    def why_unknown(self, operator: Any) -> str | None:
        return "it keeps a state"

    def loop(self, stage: StageRun, worker: Worker) -> Iterator[None]:
        return stateful_loop(stage, worker, self.of)


def stateful_loop(stage: StageRun, worker: Worker, kind: StageKind) -> Iterator[None]:
    """See the module docstring."""
    account, put = stage.run.account, partial(stage.sender.send, 0)
    get = RowIntake(stage.inboxes[0], account).get
    operator, meter = worker.operator, worker.meter
    process = stage.failures.seeded(operator.process)
    regroups = kind.gathers
    if regroups:
        operator.begin()
    initial = encode_state(operator.state_dict(), stage.name) if worker.initial is None else worker.initial
    worker.initial = initial
    operator.load_state_dict(decode(initial))
    if regroups:
        operator.begin()
    inside: Counter[Lineage] | None = Counter() if regroups and stage.plan.unordered_above else None
    number, base, drop = 0, None, 0
    snapshot: dict[str, Any] | None = None
    if stage.restart.cursor is not None:
        number, base, snapshot, drop = stage.restart.cursor
        if snapshot is not None:
            operator.load_state_dict(decode(snapshot["state"]))
        number -= drop
    done, inputs, every = 0, 0, SNAPSHOT_EVERY
    kept = [0, 0]
    held: list[Any] = []

    def cursors() -> tuple[Any, Any] | None:
        """The cursors of the next output; None if it left before the restart."""
        nonlocal number, done
        number += 1
        done += 1
        if done <= drop:
            return None
        return (number - 1, base, snapshot, done - 1), (number, base, snapshot, done)

    def send(made: Sequence[Any]) -> Iterator[None]:
        nonlocal inside
        for out in made:
            if isinstance(out, Chunk):
                if inside is not None:
                    inside -= Counter(out.lineages)
                places = cursors()
                if places is None:
                    continue
                out.before, out.after = places
                meter.items += 1
                meter.samples += len(out.lineages)
                settle(stage, worker, (), out)
            put(out)
            yield

    def work(item: Chunk | EndOfEpoch, call: Callable[[], Any]) -> Sequence[Any]:
        def answer(error: BaseException) -> Failure | None:
            if isinstance(item, Chunk):
                return stage.failures.handle(worker, item, error)
            return stage.failures.at_flush(error, item.epoch)

        return stage.failures.once(worker, partial(result_of, call), answer)

    def result_of(call: Callable[[], Any]) -> list[Any]:
        made = call()
        if kind.in_place:
            made = checked(made, stage.plan.operator, stage.name)
        return [made] if isinstance(made, Chunk) else [] if made is DROPPED else list(made)

    def release() -> None:
        for buffers in held:
            account.release(buffers)
        held.clear()

    while True:
        item = get()
        if isinstance(item, Chunk):
            stage.number(worker, item)
            after = item.after
            if item.buffers:
                held.append(item.buffers)
            if inside is not None:
                inside.update(item.lineages)
            made = work(item, partial(process, item))
            yield from send(made)
            inputs += 1
            if not regroups or made:
                release()
            if inputs >= every and not inside:
                inputs = 0
                try:
                    state = encode_state(operator.state_dict(), stage.name)
                except BaseException as error:
                    if ends_run(stage, error):
                        raise
                    note(error, f"pipegraph: stage {stage.name!r}, in its state_dict() at {where(item)}")
                    put(Failure(error, item.epoch))
                    yield
                    continue
                base, snapshot = after, {"state": state}
                every = max(SNAPSHOT_EVERY, _entries(state) // ENTRIES_PER_INPUT)
                # The previous snapshot is still referenced by chunks that are not delivered yet.
                kept.append(snapshot_bytes(snapshot))
                account.keep(kept[-1] - kept.pop(0))
                drop, done = max(0, drop - done), 0
        elif isinstance(item, EndOfEpoch):
            if regroups:
                yield from send(work(item, stage.failures.flushing(operator.flush, item.epoch)))
            release()
            stage.sender.token(0, item)
            operator.load_state_dict(decode(initial))
            if inside is not None:
                inside.clear()
            number, base, snapshot, drop, done, inputs = 0, None, None, 0, 0, 0
            every = SNAPSHOT_EVERY
            account.keep(-sum(kept))
            kept = [0, 0]
        else:
            put(item)
        yield


def _entries(state: Any) -> int:
    """The entries of an encoded state, at all depths."""
    within = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return len(within) + sum([_entries(each) for each in within if each.__class__ in (dict, list)])
