"""One run: channels, memory account and stages for consecutive epochs, and the way out of a stall.

The behaviour contract is at the head of ``crew``, which starts and ends runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pipegraph import concurrency
from pipegraph.chunk import Chunk
from pipegraph.engine.activity import Activity
from pipegraph.engine.channel import Channel
from pipegraph.engine.loader_context import LoaderContext
from pipegraph.engine.memory import Account
from pipegraph.engine.stage.bundle_size import Pace
from pipegraph.engine.stage.cursors import earlier
from pipegraph.engine.stage.horizon import Horizon
from pipegraph.engine.stage.restore import Resume, expands_below, restart_points, unique_paths, was_delivered
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import StagePump, Worker
from pipegraph.errors import MemoryLimitError, PipegraphError
from pipegraph.planning.plan import StagePlan
from pipegraph.stopping import Stopping
from pipegraph.units import format_bytes

BUNDLES_PER_LIMIT = 64
"""A bundle takes at most 1/64 of the memory limit, because it counts in a queue as a whole."""

MIN_BYTES = 512
"""The smallest memory of a queued item with its chunk object: bounds the growth of queues whose data has no buffers."""


class Run:
    """One wiring of the plan; see the module docstring."""

    def __init__(self, loader: LoaderContext, epoch: int, horizon: float, resume: Resume) -> None:
        self.plan = loader.plan
        self.seed = loader.seed
        self.rank, self.world_size = resume.stream or (loader.rank, loader.world_size)
        self.ledger = loader.ledger
        self.tracer = loader.tracer
        self.first_epoch = epoch
        self.history = resume.history
        self.activity = Activity()
        self.activity.on_idle = self._resolve
        self.account = Account(_for_chunks(loader))
        self.horizon = Horizon(self.activity, horizon, epoch)
        self.stopping = Stopping()
        self.error: BaseException | None = None
        self.channels: dict[tuple[str, int], Channel] = {}
        self.stages: dict[str, StageRun] = {}
        self._loader = loader
        self._lock = concurrency.Lock()
        self.over = False
        self._inner: list[Channel] = []
        self._pumps: list[StagePump] = []
        self._wire(resume)
        self.snapshots = {name: stage.snapshots for name, stage in self.stages.items()}

    @property
    def terminal(self) -> Channel:
        """The queue that the training loop reads."""
        return self.channels["", 0]

    def positions_of(self, source: str, steps: range, epoch: int) -> Iterable[int]:
        """The positions of a source's steps; none once the crew is closed."""
        reader = self._loader.readers.get(source)
        if reader is None and (workers := self._loader.workers.get(source)):
            reader = workers[0].operator
        return () if reader is None else reader.positions_of(steps, epoch, self.rank, self.world_size)

    # -- wiring --------------------------------------------------------------------------------

    def _wire(self, resume: Resume) -> None:
        plan = self.plan
        for stage in plan.running:
            self.stages[stage.name] = StageRun(stage, self)
        for stage in plan.running:
            run = self.stages[stage.name]
            run.outboxes = [[] for _ in range(stage.outputs)]
            run.inboxes = [None] * len(stage.upstream)  # type: ignore[list-item]
        edges = [
            (consumer.name, index, edge)
            for consumer in plan.running
            for index, edge in enumerate(consumer.upstream)
        ]
        edges.append(("", 0, plan.output))
        share = max(1, self.account.limit // len(edges))
        for consumer, index, edge in edges:
            producer = plan.stages[edge.stage]
            channel = Channel(
                self._loader.capacity(producer.name),
                producer.spec.max_bytes or share,
                self.activity,
                sequenced=self.stages[producer.name].by_ticket,
                bundle_rows=producer.bundle_rows,
                heavy_capacity=producer.heavy_capacity,
            )
            channel.on_split = self.account.hold
            channel.readers = plan.stages[consumer].workers if consumer else 1
            self.channels[consumer, index] = channel
            self.stages[producer.name].outboxes[edge.output].append(channel)
            if consumer:
                self.stages[consumer].inboxes[index] = channel
        self._restore(resume)
        for name, snapshot in resume.iterators.items():
            self.stages[name].snapshots.begin(self.first_epoch, snapshot)
        for stage in plan.running:
            run = self.stages[stage.name]
            run.above = [self.stages[edge.stage] for edge in stage.upstream]
            run.pace = self._pace(stage)
            if run.collects and run.above[0].plan.bundle == stage.name:
                run.above[0].pack = stage.packing()
            takes_rows = stage.source is None and stage.kind.parallel and stage.traits.blocks
            if takes_rows and (stage.remote or stage.traits.unpacks):
                # A sample that is broken is found there, too late for a policy of the stage above.
                above = run.above[0]
                above.unpacked_below = above.plan.bundle_rows > 1 and above.plan.spec.on_error == "raise"
            fed = stage.kind.feed(run, self._loader.readers.get(stage.name), self.activity)
            if fed is not None:
                inner, pump = fed
                self._pumps.append(pump)
                run.inboxes = [inner]
                self._inner.append(inner)
            run.wire()

    def _pace(self, stage: StagePlan) -> Pace:
        """The bundle sizes with which a stage begins."""
        nbytes = max(1, min(self.account.limit // BUNDLES_PER_LIMIT, stage.backend.bundle_bytes))
        reader = self._loader.readers.get(stage.name)
        rows, fewest, size, batches = stage.kind.bundle_sizes(stage, self.plan, reader, self.world_size)
        return Pace(rows, fewest, size, nbytes, stage.backend.bundle_ms, batches)

    def _restore(self, resume: Resume) -> None:
        if resume.cursor is None and not (resume.delivered or resume.begun):
            return
        found = restart_points(self.plan, resume.cursor, resume.begun)
        for name, restart in found.stages.items():
            self.stages[name].restart = restart
        for edge, cursor in found.skips.items():
            self.channels[edge].skip(self.first_epoch, _before(cursor))
        delivered = {path: frozenset(rows) for path, rows in resume.delivered.items()}
        if delivered:
            for edge, path in unique_paths(self.plan).items():
                consumer = self.plan.stages[edge[0]] if edge[0] else None
                below = self.plan.stages[
                    self.plan.output.stage if consumer is None else consumer.upstream[edge[1]].stage
                ]
                filterable = below.unordered_above or (
                    consumer is not None and consumer.unordered_above and consumer.kind.by_sample
                )
                if filterable:
                    shorten = below.unordered_above and not expands_below(self.plan, edge)
                    self.channels[edge].skip(self.first_epoch, was_delivered(delivered, path, shorten))

    # -- while it runs -------------------------------------------------------------------------

    def pumps(self, stage: StagePlan, worker: Worker) -> None:
        """Let threads that wait for an inline stage's output drive it."""
        run = self.stages[stage.name]
        worker.meter.began_ns = 0  # the run before may have ended in the middle of an item
        channels = [channel for output in run.outboxes for channel in output]
        pump = StagePump(stage.kind.loop(run, worker), lambda: _nudge(channels), stage.name, self.fail)
        self._pumps.append(pump)
        for channel in channels:
            channel.pump = pump

    def discard_output(self, epoch: int) -> None:
        """Drop the rest of ``epoch``; the stages above stop making it."""
        for chunk in self.terminal.discard(epoch):
            self.account.release(chunk.buffers)
        self.stages[self.plan.output.stage].stop(epoch)

    def fail(self, error: BaseException) -> None:
        """End the run with this error, unless it has ended already."""
        with self._lock:
            if self.over:
                return
            if self.error is None:
                self.error = error
        self.cancel()

    def cancel(self) -> None:
        """Wake all waiting threads with ``Cancelled``."""
        with self._lock:
            self.over = True
        self.stopping.set()
        self.horizon.cancel()
        self.account.cancel()
        for channel in (*self.channels.values(), *self._inner):
            channel.cancel()

    def end_inline(self) -> None:
        """After ``cancel``: end the loops of inline stages; those of workers have ended by themselves."""
        for pump in self._pumps:
            pump.end()

    # -- stalls --------------------------------------------------------------------------------

    def _resolve(self) -> None:
        """Resolve a stall: every thread waits. Called, without locks, by the thread that noticed."""
        with self._lock:
            if self.over:
                return
        stillness = self.activity.stillness()
        if stillness is None:
            return
        error = self._grow_or_explain()
        if error is not None and stillness == self.activity.stillness():
            self.fail(error)  # otherwise a worker has joined meanwhile: once it waits too, it resolves again

    def _grow_or_explain(self) -> PipegraphError | None:
        """Enlarge a queue if that helps; else return the reason for the stall."""
        full = [
            (channel.stats().capacity, *edge, channel)
            for edge, channel in self.channels.items()
            if channel.full() and self._read_in_turn(edge[0])
        ]
        if full:
            capacity, consumer, index, channel = min(full, key=lambda entry: entry[:3])
            if max(capacity * MIN_BYTES, self.account.used) <= self.account.limit:
                producer = self._producer(consumer, index)
                self._loader.note_growth(producer, channel.grow())
                return None
            return self._too_long(consumer, index, capacity)
        return PipegraphError(
            "the pipeline is stalled: every stage waits for another (a defect of pipegraph)"
        )

    def _read_in_turn(self, consumer: str) -> bool:
        """Whether a fan-in decides when this stage's input is read: only then can a larger queue end a stall.

        Another full queue waits for its consumer, which waits for a queue further down.
        """
        if not consumer:
            return False
        stage = self.plan.stages[consumer]
        if stage.kind.reads_in_turn:
            return True
        below = [name for name, _, _ in self.plan.consumers(consumer)]
        return stage.backend.in_consumer and any(self._read_in_turn(name) for name in below)

    def _producer(self, consumer: str, index: int) -> str:
        edge = self.plan.stages[consumer].upstream[index] if consumer else self.plan.output
        return edge.stage

    def _too_long(self, consumer: str, index: int, capacity: int) -> MemoryLimitError:
        return MemoryLimitError(
            f"memory_limit={format_bytes(self.account.limit)}: the queue {self._producer(consumer, index)} -> "
            f"{consumer or 'the loader'} has had to hold {capacity} items, because the branches of a fan-out that "
            "meet again advance at very different rates. Bring their rates together, or read the source twice"
        )


def _nudge(channels: list[Channel]) -> None:
    for channel in channels:
        channel.nudge()


def _for_chunks(loader: LoaderContext) -> int:
    """Bytes of the limit left for chunks, after what operators hold themselves, such as blocks of shards."""
    limit = loader.memory_limit
    holding = [stage.traits.holds for stage in loader.plan.running]
    return max(1, limit - sum(holds(limit) for holds in holding if holds is not None))


def _before(cursor: object) -> Callable[[Chunk], bool]:
    return lambda item: earlier(item.before, cursor)
