"""Sources with random access: one loop deals positions, and all workers of the stage read them.

Reading a position is a map's work; the cursor is a source's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from operator import index as as_int
from time import perf_counter_ns
from typing import Any

from pipegraph.bundle import Bundle, PackedParts, filled
from pipegraph.chunk import Chunk, EndOfEpoch, Failure, Lineages
from pipegraph.contracts import DrawnRows
from pipegraph.engine.activity import Activity
from pipegraph.engine.channel import Channel
from pipegraph.engine.kinds.source import SourceKind, failure_of, snapshot_of
from pipegraph.engine.stage.hand_over import batches_of
from pipegraph.engine.stage.parallel import ByBundle, parallel
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import MORE, Loop, StagePump, Worker
from pipegraph.global_generators import Draws
from pipegraph.planning.plan import Plan, StagePlan

MAX_UNNEEDED = 1 << 20
"""Positions of an epoch cut short that are drawn nevertheless."""

AT_ONCE = 1 << 12


class RandomAccessKind(SourceKind):
    """See the module docstring."""

    def fixed(self, operator: object) -> None:
        return None

    def hands_over_rows(self, stage: StagePlan) -> bool:
        return True

    def bundle_sizes(
        self, stage: StagePlan, plan: Plan, reader: object, world_size: int
    ) -> tuple[int, int, int, int]:
        rows, _, size, batches = super().bundle_sizes(stage, plan, reader, world_size)
        if stage.bundle is None and stage.traits.sampled:
            rows = 1  # the sampler may wait until the consumer has processed the previous row
        group = stage.traits.group if stage.cached_in is None else 1
        return max(rows, group), group, size, batches

    def feed(self, stage: StageRun, reader: object, activity: Activity) -> tuple[Channel, StagePump]:
        inner = Channel(max(64, 2 * stage.plan.workers, stage.pace.max_rows), None, activity)
        loop = positions_loop(stage, reader, inner)
        inner.pump = StagePump(loop, inner.nudge, stage.name, stage.run.fail)
        return inner, inner.pump

    def loop(self, stage: StageRun, worker: Worker) -> Loop:
        do = worker.operator.do if stage.plan.remote else _Reads(stage, worker).do
        return parallel(stage, worker, do, None, True)


def positions_loop(stage: StageRun, source: Any, inner: Channel) -> Loop:
    """Feed the positions of a random-access source to its workers, which read them as a map stage would.

    Runs inline: a worker that finds ``inner`` empty steps this loop.
    """
    run, name, pace = stage.run, stage.name, stage.pace
    epoch, step = run.first_epoch, stage.restart.step
    single = pace.max_rows == 1
    traits = stage.plan.traits
    sampled, waits, resumable = traits.sampled, traits.waits, stage.plan.draws_resumably
    timed = sampled or not traits.trusted  # a user's code, which may be slow
    # Deal bundles one at a time: a better size may be known for the next one.
    room = inner.stats().capacity if single and not waits else 1
    draws = None if traits.seeds_itself else Draws(run.seed, name)
    began = step
    while True:
        run.horizon.wait_for(epoch, source.reads_ahead)
        filled = 0
        positions: Any = None
        ended = False
        # Begun also if nobody needs the epoch: what its generator gives must not depend on who was first.
        begins = resumable
        while begins or stage.stop_epoch < epoch:
            begins = False
            group: Any = DrawnRows([], []) if sampled else []
            failure: Failure | None = None
            try:
                if positions is None:
                    stage.snapshots.restore(source, epoch, run.first_epoch)
                    if resumable and stage.snapshots.begins(epoch, run.first_epoch):
                        failure = snapshot_of(stage, source.between, epoch, 0)
                    ranks = run.rank, run.world_size
                    seeded: Callable[[], object] = (
                        bool if draws is None else partial(draws.one, epoch, ("positions",))
                    )
                    seeded()
                    positions = iter(source.positions(epoch, *ranks, step))
                    positions = positions if draws is None else draws.lazily(positions)
                rows = pace.rows(step - began)
                if timed:
                    stage.draws_since_ns = perf_counter_ns()
                if sampled:
                    group.draw(positions, rows)
                else:
                    group.extend(islice(positions, rows))
                if timed:
                    stage.drawing_ns += perf_counter_ns() - stage.draws_since_ns
                stage.draws_since_ns = 0
            except BaseException as error:
                stage.draws_since_ns = 0
                failure = failure_of(stage, error, epoch, step + len(group))
            if not group:
                if failure is not None:
                    inner.put(failure)
                ended = True
                break
            places = group.positions if sampled else list(map(as_int, group))
            if single:
                inner.put(Chunk(group[0], ((name, places[0]),), epoch, step, step + 1))
            else:
                inner.put(Bundle(group, Lineages(name, places), epoch, step))
            step += len(group)
            if failure is not None:
                inner.put(failure)
                ended = True
                break
            filled += 1
            if filled == room:
                filled = 0
                yield None if waits else MORE
        if stage.snapshots.taken and not ended:
            # The next epoch begins where a generator stands then, and must not depend on how far this was read ahead.
            length = source.length(epoch, run.rank, run.world_size)
            for _ in _drawn_to_the_end(positions, 0 if length is None else length + 1 - step):
                yield MORE
        # Before the epoch's end is sent: a state taken after it must hold the sampler's generator as of now.
        failed = snapshot_of(stage, source.between, epoch + 1, 0) if resumable else None
        if failed is not None:
            inner.put(failed)
        inner.put(EndOfEpoch(epoch))
        epoch, step, began = epoch + 1, 0, 0
        yield


def _drawn_to_the_end(positions: Iterator[object], left: int) -> Iterator[None]:
    """Draw positions that nobody needs, if they are not too many: a few in each step."""
    with suppress(Exception):  # of a sampler's; nobody needs these
        for _ in range(0, left if left <= MAX_UNNEEDED else 0, AT_ONCE):
            deque(islice(positions, AT_ONCE), maxlen=0)
            yield


class _Reads(ByBundle):
    """Reads the items of positions."""

    def __init__(self, stage: StageRun, worker: Worker) -> None:
        super().__init__(stage, worker, self._read)
        self._bundles = stage.plan.traits.blocks
        self._draws = Draws(stage.run.seed, stage.name)
        self._copies = False
        self._run = stage
        if not self._bundles:
            self.packs = None

    def _read(self, chunk: Chunk) -> Chunk:
        return filled(chunk, self.worker.operator.read(chunk.data, chunk.epoch))

    def given(self, bundle: Bundle) -> Any:
        if not self._bundles:
            return bundle
        run = self._run
        self._spans = batches_of(run, bundle) if run.pace.heavy and not run.unpacked_below else ()
        return self.worker.operator.indices_of(bundle.data, bundle.epoch)

    def columns(self, given: Any) -> Any:
        """Of large rows those of each batch by themselves: else they would be copied."""
        spans, columns = self._spans, self.worker.operator.columns
        if len(spans) < 2:
            return columns(given)
        parts = [columns(given[start:stop]) for start, stop in spans]
        return None if None in parts else PackedParts(parts, spans)

    def work_into(self, made: list[object], given: Any, at: int) -> None:
        source = self.worker.operator
        if self._bundles:
            source.read_into(made, given, at)
            return
        for row in range(at, given.count):
            self._draws.one(given.epoch, given.lineages[row])
            made.append(source.read(given.data[row], given.epoch))
