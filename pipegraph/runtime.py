"""Start, stop, join; the first failure wins.

Behaviour contract (what differs from this is a bug):

* A ``Runtime`` owns every thread of a loader. They start with the first run and live until ``close``;
  each worker opens its own copy of its operator once, in its own thread.
* A ``Run`` is the wiring for consecutive epochs: fresh channels, account and stages. A pass that
  follows the one before continues the run; any other (after a ``break``, ``set_epoch`` or
  ``load_state_dict``) cancels it, waits until every worker has left it, and starts another.
* Whoever fails outside an item's place calls ``Run.fail``: the first error is kept, everything is
  cancelled, and the consumer raises it.
* When every thread of a run waits (``activity``), the thread that noticed enlarges the smallest full
  queue (Parks, "Bounded Scheduling of Process Networks", 1995), or lets the worker furthest
  down exceed its ceiling within the limit, or ends the run with the reason. It never hangs.
* ``close`` cancels, wakes, and joins for ``GRACE_S``; what does not return by then is named with its
  stack in a ``StuckWorker`` warning and abandoned (its thread is a daemon).
"""

from __future__ import annotations

import copy
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipegraph.account import Account
from pipegraph.activity import Activity, Cancelled
from pipegraph.channel import Channel
from pipegraph.chunk import Lineage
from pipegraph.contracts import Context, Merge, Source
from pipegraph.errors import MemoryLimitError, PipegraphError, PipegraphWarning, StuckWorker
from pipegraph.plan import Plan, StagePlan
from pipegraph.stage.caching import wire_cache
from pipegraph.stage.cursors import earlier
from pipegraph.stage.horizon import Horizon
from pipegraph.stage.ledger import Ledger
from pipegraph.stage.loops import loop_for
from pipegraph.stage.restore import (
    Path,
    may_filter,
    restarts,
    unique_paths,
    was_delivered,
)
from pipegraph.stage.sources import positions_loop
from pipegraph.stage.stage import Meter, StageRun, Worker
from pipegraph.tally import Tally
from pipegraph.units import format_bytes

GRACE_S = 5.0
"""How long ``close`` waits for user code to return."""

LEAST_BYTES = 512
"""What an item in a queue takes at the very least, with its chunk object: bounds growth where data holds no buffers."""


class Pump:
    """Lets one waiting thread at a time step an inline stage. See ``channel.Pump``."""

    def __init__(self, loop: Iterator[None], channels: list[Channel]) -> None:
        self._loop = loop
        self._channels = channels
        self._lock = threading.Lock()
        self._busy = False

    def try_enter(self) -> bool:
        """Become the driver."""
        with self._lock:
            if self._busy:
                return False
            self._busy = True
            return True

    def step(self) -> None:
        """One unit of work."""
        for _ in self._loop:
            return
        raise Cancelled  # it has ended by an error, which its driver had

    def leave(self) -> None:
        """Free the role, then let a waiter of each channel look again: it may have found us busy."""
        with self._lock:
            self._busy = False
        for channel in self._channels:
            channel.nudge()


class Run:
    """One wiring of the graph; see the module docstring."""

    def __init__(self, runtime: Runtime, epoch: int, horizon: float, resume: Resume) -> None:
        self.plan = runtime.plan
        self.seed = runtime.seed
        self.rank, self.world_size = resume.stream or (runtime.rank, runtime.world_size)
        self.ledger = runtime.ledger
        self.first_epoch = epoch
        self.activity = Activity()
        self.activity.on_idle = self._resolve
        self.account = Account(runtime.memory_limit, self.activity)
        self.horizon = Horizon(self.activity, horizon)
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self.grown: dict[str, int] = {}
        self.channels: dict[tuple[str, int], Channel] = {}
        self.stages: dict[str, StageRun] = {}
        self._runtime = runtime
        self._lock = threading.Lock()
        self._cancelled = False
        self._inner: list[Channel] = []
        self._wire(resume)

    @property
    def terminal(self) -> Channel:
        """The queue that the consumer reads."""
        return self.channels["", 0]

    def snapshots_taken(self) -> bool:
        """Whether a source's iterator can go on from a state of its own."""
        return any(stage.snapshots.any for stage in self.stages.values())

    def context(self, stage: str, worker: int) -> Context:
        """What a worker's operator is opened with."""
        return self._runtime.context(stage, worker)

    # -- wiring --------------------------------------------------------------------------------

    def _wire(self, resume: Resume) -> None:
        plan = self.plan
        depths = _depths(plan)
        for stage in plan.running:
            self.stages[stage.name] = StageRun(stage, self, depths[stage.name])
        share = max(1, self.account.limit // max(1, len(plan.running)))
        for stage in plan.running:
            run = self.stages[stage.name]
            outputs = getattr(stage.operator, "outputs", 1)
            run.outboxes = [[] for _ in range(outputs)]
            run.inboxes = [None] * len(stage.upstream)  # type: ignore[list-item]
        edges = [
            (consumer.name, index, edge)
            for consumer in plan.running
            for index, edge in enumerate(consumer.upstream)
        ]
        for consumer, index, edge in [*edges, ("", 0, plan.output)]:
            producer = plan.stages[edge.stage]
            channel = Channel(
                self._runtime.capacity(producer.name),
                producer.spec.max_bytes or share,
                self.activity,
                lanes=self.stages[producer.name].pooled,
            )
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
            if isinstance(stage.operator, Source) and stage.operator.random_access:
                inner = Channel(max(16, 2 * stage.workers), None, self.activity)
                inner.pump = Pump(positions_loop(run, self._runtime.readers[stage.name], inner), [inner])
                run.inboxes = [inner]
                self._inner.append(inner)
            if run.pooled and run.budgeted:
                run.number_items()
            if run.unordered:
                run.track_tickets()

    def _restore(self, resume: Resume) -> None:
        if resume.cursor is None and not resume.delivered:
            return
        found = restarts(self.plan, resume.cursor)
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
                    consumer is not None and consumer.unordered_above and may_filter(consumer.operator)
                )
                if filterable:
                    self.channels[edge].skip(self.first_epoch, was_delivered(delivered, path))

    # -- conduct -------------------------------------------------------------------------------

    def pumps(self, stage: StagePlan, worker: Worker) -> None:
        """Make an inline stage step when its output is waited for."""
        run = self.stages[stage.name]
        channels = [channel for output in run.outboxes for channel in output]
        pump = Pump(loop_for(run, worker), channels)
        for channel in channels:
            channel.pump = pump

    def fail(self, error: BaseException) -> None:
        """End the run with this error, unless it has ended already."""
        with self._lock:
            if self._cancelled:
                return
            if self.error is None:
                self.error = error
        self.cancel()

    def cancel(self) -> None:
        """Wake everybody with ``Cancelled``."""
        with self._lock:
            self._cancelled = True
        self.stopping.set()
        self.horizon.cancel()
        self.account.cancel()
        for channel in (*self.channels.values(), *self._inner):
            channel.cancel()

    # -- standing still ------------------------------------------------------------------------

    def _resolve(self) -> None:
        """Every thread waits. Runs in the thread that noticed, which holds no lock."""
        with self._lock:
            if self._cancelled:
                return
        if self.account.admit_one():
            return
        full = [
            (channel.stats().capacity, *edge, channel)
            for edge, channel in self.channels.items()
            if channel.full() and self._read_in_turn(edge[0])
        ]
        if full:
            capacity, consumer, index, channel = min(full, key=lambda entry: entry[:3])
            if capacity * LEAST_BYTES <= self.account.limit:
                producer = self._producer(consumer, index)
                self.grown[producer] = channel.grow()
                self._runtime.note_growth(producer, self.grown[producer])
            else:
                self.fail(self._too_long(consumer, index, capacity))
        elif self.account.waiting():
            self.fail(self._no_memory())
        else:
            self.fail(
                PipegraphError(
                    "the pipeline stands still: every stage waits for another (a defect of pipegraph)"
                )
            )

    def _read_in_turn(self, consumer: str) -> bool:
        """Whether a fan-in decides when this stage's input is read: only there more room brings anything on.

        Everywhere else a full queue waits for its consumer, which itself waits further down.
        """
        if not consumer:
            return False
        stage = self.plan.stages[consumer]
        if isinstance(stage.operator, Merge):
            return True
        below = [name for name, _, _ in self.plan.consumers(consumer)]
        return stage.backend == "inline" and any(self._read_in_turn(name) for name in below)

    def _producer(self, consumer: str, index: int) -> str:
        edge = self.plan.stages[consumer].upstream[index] if consumer else self.plan.output
        return edge.stage

    def _too_long(self, consumer: str, index: int, capacity: int) -> MemoryLimitError:
        return MemoryLimitError(
            f"memory_limit={format_bytes(self.account.limit)}: the queue {self._producer(consumer, index)} -> "
            f"{consumer or 'the loader'} has had to hold {capacity} items, because the branches of a fan-out that "
            "meet again advance at very different rates. Bring their rates together, or read the source twice"
        )

    def _no_memory(self) -> MemoryLimitError:
        waiting = self.account.waiting()
        held = {}
        for (consumer, index), channel in self.channels.items():
            stats = channel.stats()
            if stats.nbytes:
                held[f"{self._producer(consumer, index)} -> {consumer or 'the loader'}"] = stats.nbytes
        queues = ", ".join(
            f"{edge} {format_bytes(n)}" for edge, n in sorted(held.items(), key=lambda e: -e[1])[:4]
        )
        inside = self.account.used - sum(held.values())
        return MemoryLimitError(
            f"memory_limit={format_bytes(self.account.limit)} is too small for this graph: "
            f"{format_bytes(self.account.used)} are in flight, stages {', '.join(map(repr, dict.fromkeys(waiting)))} "
            f"wait for room and nothing moves (in queues: {queues or 'none'}; inside stages, as open batches and "
            f"windows: {format_bytes(max(0, inside))}). Raise memory_limit, or make batches, "
            "windows or capacities smaller"
        )


def _before(cursor: Any) -> Callable[[Any], bool]:
    return lambda item: earlier(item.before, cursor)


def _depths(plan: Plan) -> dict[str, int]:
    """Stages between each stage and the consumer, on the longest way."""
    depths = {plan.output.stage: 0}
    for stage in reversed(plan.running):
        for edge in stage.upstream:
            depths[edge.stage] = max(depths.get(edge.stage, 0), depths[stage.name] + 1)
    return depths


class Resume:
    """Where a run starts inside its first epoch."""

    def __init__(
        self,
        cursor: Any = None,
        delivered: dict[Path, set[Lineage]] | None = None,
        history: tuple[tuple[int, int], ...] = (),
        stream: tuple[int, int] | None = None,
        iterators: Mapping[str, tuple[int, Any]] | None = None,
    ) -> None:
        self.cursor = cursor
        self.delivered = delivered or {}
        self.history = history
        self.iterators = iterators or {}
        self.stream = stream  # (rank, world size) whose part of the epoch is run, where it is not this rank's


class Runtime:
    """Owns the threads of one loader. Its methods are called by the consumer's thread."""

    def __init__(self, plan: Plan, memory_limit: int, seed: int, rank: int, world_size: int) -> None:
        self.plan = plan
        self.memory_limit = memory_limit
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.ledger = Ledger()
        self.run: Run | None = None
        self.workers: dict[str, list[Worker]] = {}
        self.meters: dict[str, list[Meter]] = {}  # kept after close
        self.tally = Tally(self)
        self.readers: dict[str, Source] = {}  # deal the positions of random-access sources
        self.grown: dict[str, int] = {}
        self.counters: dict[str, dict[str, int]] = {}
        self.stopping = threading.Event()
        self._sharing = threading.RLock()
        self._shared: dict[tuple[str, str], Any] = {}
        self._condition = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._run_number = 0
        self._inside = 0
        self._opening = 0
        self._open_error: BaseException | None = None
        self._close_errors: list[str] = []
        self._closed = False

    # -- facts for runs --------------------------------------------------------------------------

    def capacity(self, stage: str) -> int:
        """A stage's queue capacity, as it has grown."""
        return self.grown.get(stage, self.plan.stages[stage].capacity)

    def note_growth(self, stage: str, capacity: int) -> None:
        """Parks' rule enlarged a queue: later runs start with it."""
        self.grown[stage] = max(capacity, self.grown.get(stage, 0))

    def context(self, stage: str, worker: int) -> Context:
        """What a worker's operator is opened with."""
        counters = self.counters.setdefault(stage, {})

        def count(name: str, n: int) -> None:
            with self._condition:
                counters[name] = counters.get(name, 0) + n

        def share(name: str, make: Callable[[], Any]) -> Any:
            with self._sharing:
                if (stage, name) not in self._shared:
                    self._shared[stage, name] = make()
                return self._shared[stage, name]

        read = any(
            self.plan.stages[name].operator.name != "scatter" for name, _, _ in self.plan.consumers(stage)
        )
        memory = self.plan.stages[stage].memory
        stopping = self.stopping
        return Context(
            stage,
            self.seed,
            self.rank,
            self.world_size,
            worker,
            stopping,
            count,
            share,
            read,
            memory,
            self.memory_limit,
        )

    # -- runs ----------------------------------------------------------------------------------

    def start_run(self, epoch: int, horizon: float, resume: Resume) -> Run:
        """Cancel the run there is, and start one at ``epoch``.

        Raises:
            Exception: whatever an operator's ``open`` raised, with a note that names the stage.
        """
        if self.run is not None:
            self.end_run()
            for workers in self.workers.values():
                for worker in workers:
                    worker.operator.uncancel()
        if not self.workers:
            self._start_workers()
        for stage in self.plan.running:  # no worker is inside a run now
            if isinstance(stage.operator, Source):
                copies = [worker.operator for worker in self.workers[stage.name]]
                for source in (*copies, *filter(None, [self.readers.get(stage.name)])):
                    source.go_on(epoch, resume.history)
        run = Run(self, epoch, horizon, resume)
        run.activity.attach()  # the consumer
        for stage in self.plan.running:
            if stage.backend == "inline":
                run.pumps(stage, self.workers[stage.name][0])
        with self._condition:
            count = len(self._threads)
            run.activity.attach(count)
            self._inside = count
            self.run = run
            self._run_number += 1
            self._condition.notify_all()
        return run

    def end_run(self) -> None:
        """Cancel the current run and wait until every worker has left it."""
        run = self.run
        if run is None:
            return
        self._cancel(run)
        with self._condition:
            while self._inside:
                self._condition.wait()
            self.run = None

    def _cancel(self, run: Run) -> None:
        run.cancel()
        for workers in self.workers.values():
            for worker in workers:
                if worker.opened:
                    worker.operator.cancel()

    def _start_workers(self) -> None:
        threads = []
        operators = {
            stage.name: [copy.copy(stage.operator) for _ in range(stage.workers)]
            for stage in self.plan.running
        }
        for stage in self.plan.running:
            if isinstance(stage.operator, Source) and stage.operator.random_access:
                self.readers[stage.name] = copy.copy(stage.operator)
        wire_cache(self.plan, operators, self.readers)
        for name, reader in self.readers.items():
            reader.open(self.context(name, 0))
        for stage in self.plan.running:
            self.workers[stage.name] = [
                Worker(i, operator) for i, operator in enumerate(operators[stage.name])
            ]
            self.meters[stage.name] = [worker.meter for worker in self.workers[stage.name]]
            for worker in self.workers[stage.name]:
                if stage.backend == "inline":
                    self._open(stage.name, worker)
                    continue
                name = f"pipegraph-{self.plan.graph_name}-{stage.name}-{worker.index}"
                threads.append(
                    threading.Thread(target=self._work, args=(stage, worker), name=name, daemon=True)
                )
        self._opening = len(threads)
        self._threads = threads
        for thread in threads:
            thread.start()
        with self._condition:
            while self._opening and self._open_error is None:
                self._condition.wait()
            error = self._open_error
        if error is not None:
            raise error

    def _open(self, stage: str, worker: Worker) -> None:
        try:
            worker.operator.open(self.context(stage, worker.index))
        except BaseException as error:
            error.add_note(f"pipegraph: stage {stage!r}: worker {worker.index} could not be started")
            raise
        worker.opened = True

    def _work(self, stage: StagePlan, worker: Worker) -> None:
        """The life of a worker's thread."""
        try:
            self._open(stage.name, worker)
        except BaseException as error:
            with self._condition:
                self._open_error = self._open_error or error
                self._opening -= 1
                self._condition.notify_all()
            return
        with self._condition:
            self._opening -= 1
            self._condition.notify_all()
        seen = 0
        try:
            while True:
                with self._condition:
                    while self._run_number == seen and not self._closed:
                        self._condition.wait()
                    if self._run_number == seen:
                        return
                    seen, run = self._run_number, self.run
                assert run is not None
                try:
                    for _ in loop_for(run.stages[stage.name], worker):
                        pass
                except Cancelled:
                    pass
                except BaseException as error:
                    error.add_note(f"pipegraph: in stage {stage.name!r}")
                    run.fail(error)
                finally:
                    with self._condition:
                        self._inside -= 1
                        self._condition.notify_all()
                    run.activity.pause()
                    run = None
        finally:
            self._close_operator(stage.name, worker)

    def _close_operator(self, stage: str, worker: Worker) -> None:
        for operator in (worker.operator, *(worker.chain or ())):
            try:
                operator.close()
            except BaseException as error:
                self._close_errors.append(f"stage {stage!r}: close() raised {type(error).__name__}: {error}")

    # -- the end -------------------------------------------------------------------------------

    def signal_close(self) -> None:
        """Tell every worker to end; joins nobody. Safe from any thread, also from the garbage collector."""
        with self._condition:
            self._closed = True
            run = self.run
            self._condition.notify_all()
        self.stopping.set()
        if run is not None:
            self._cancel(run)

    def close(self, grace_s: float = GRACE_S) -> None:
        """End every thread; idempotent. Warns of workers that do not return within the grace."""
        self.signal_close()
        stuck = _join(self._threads, grace_s)
        warned = []
        for thread in stuck:
            frame = sys._current_frames().get(thread.ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else "(no stack)\n"
            stage = thread.name.removeprefix(f"pipegraph-{self.plan.graph_name}-").rpartition("-")[0]
            warned.append(
                f"stage {stage!r}: a worker did not return within {grace_s:g} s and was abandoned; it "
                f"stands at:\n{stack}"
            )
        for stage_plan in self.plan.running:
            if stage_plan.backend == "inline":
                for worker in self.workers.get(stage_plan.name, ()):
                    if worker.opened:
                        self._close_operator(stage_plan.name, worker)
        for reader in self.readers.values():
            reader.close()
        self.workers, self.readers, self._threads = {}, {}, []
        self.run = None
        for message in warned:  # last: where warnings are errors the rest is done
            warnings.warn(message, StuckWorker, stacklevel=3)
        errors, self._close_errors = self._close_errors, []
        for message in errors:
            warnings.warn(message, PipegraphWarning, stacklevel=3)


def _join(threads: list[threading.Thread], grace_s: float) -> list[threading.Thread]:
    """Join threads within one common grace; returns those that still live."""
    from time import monotonic

    deadline = monotonic() + grace_s
    for thread in threads:
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join(max(0.0, deadline - monotonic()))
    return [t for t in threads if t.is_alive() and t is not threading.current_thread()]
