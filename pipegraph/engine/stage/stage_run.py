"""One stage of a run: its channels, memory account and what its loops share.

A ``StageRun`` lives as long as one run (from a pass's start until it is cancelled or replaced); its
``Worker``s, with their opened operators, live as long as the loader.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from pipegraph.chunk import Chunk, Cursor, Failure
from pipegraph.contracts import Operator, RowOperator, Source
from pipegraph.durations import BATCH, Stopwatch
from pipegraph.engine.activity import count_wakes
from pipegraph.engine.channel import Channel
from pipegraph.engine.memory import Buffers
from pipegraph.engine.stage.failure_notes import not_a_chunk
from pipegraph.engine.stage.failure_policy import Failures, open_substitutes
from pipegraph.engine.stage.ordinals import Ordinals
from pipegraph.engine.stage.sender import AsFinished, ByTicket, Sender
from pipegraph.engine.stage.snapshots import Snapshots
from pipegraph.engine.tracing import Tracer
from pipegraph.machine import scheduled
from pipegraph.planning.isolation import Elsewhere
from pipegraph.planning.plan import StagePlan
from pipegraph.policies import final_policy
from pipegraph.tree import ATOMS, buffers

if TYPE_CHECKING:
    from pipegraph.engine.run import Run
    from pipegraph.engine.stage.bundle_size import Pace


class Meter:
    """One worker's counters. Written by that worker alone, read by anyone: a torn view is one item off."""

    __slots__ = (
        "_busy_ns _clock _cpu_ns _noted _stage _thread _tracer _waited_ns calls dropped failed items "
        "late_ns nbytes retried samples wakes watch"
    ).split()

    def __init__(self, stage: str = "", tracer: Tracer | None = None) -> None:
        self._stage = stage
        self._tracer = tracer or Tracer()
        self._clock: int | None = (
            None  # of its thread's time on a core, read by whoever asks: items pay nothing
        )
        self._cpu_ns = 0
        self._thread = 0  # its number in the system, whose scheduler knows how long it waited for a core
        self._waited_ns = 0
        self._busy_ns = 0
        self.watch = Stopwatch()
        self._noted = self.watch.noted
        self.calls = 0
        self.items = 0
        self.samples = 0
        self.nbytes = 0
        self.dropped = 0
        self.failed = 0
        self.retried = 0
        self.wakes = 0
        self.late_ns = 0

    @property
    def busy_ns(self) -> int:
        """Nanoseconds of work; what it grows by is how long one call took."""
        return self._busy_ns

    @busy_ns.setter
    def busy_ns(self, total: int) -> None:
        noted = self._noted
        took = total - self._busy_ns
        noted.append(took)
        self._busy_ns = total
        if self._tracer.on:
            self._tracer.worked(self._stage, took)
        if len(noted) >= BATCH:
            self.watch.count()

    def values(self) -> tuple[int, ...]:
        """All counters, as :meth:`of` takes them."""
        return (
            *(self.busy_ns, self.calls, self.items, self.samples, self.nbytes),
            *(self.dropped, self.failed, self.retried, self.cpu_ns(), self.waited_ns()),
            *(self.wakes, self.late_ns),
        )

    @staticmethod
    def of(values: Sequence[int]) -> Meter:
        """A meter that shows these."""
        meter = Meter()
        meter._busy_ns, meter.calls, meter.items, meter.samples, meter.nbytes = values[:5]
        meter.dropped, meter.failed, meter.retried, meter._cpu_ns, meter._waited_ns = values[5:10]
        meter.wakes, meter.late_ns = values[10:]
        return meter

    def thread_begins(self) -> None:
        """Called by the worker's own thread; an inline stage has none, nor have all systems such clocks.

        A meter may have several threads, one after the other.
        """
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._thread = threading.get_native_id()
        count_wakes(self)

    def thread_ends(self) -> None:
        """Called by the worker's own thread, whose clock ends with it."""
        ran, waited = self.cpu_ns(), self.waited_ns()
        self._clock, self._thread = None, 0
        self._cpu_ns, self._waited_ns = ran, waited

    def cpu_ns(self) -> int:
        """How long the thread has run on a core so far; 0 where that is not known."""
        clock = self._clock
        if clock is not None:
            try:
                return self._cpu_ns + time.clock_gettime_ns(clock)
            except OSError:  # the thread has just ended, or lives on in the process that forked this one
                pass
        return self._cpu_ns

    def waited_ns(self) -> int:
        """How long the thread has been ready to run and had no core so far; 0 where that is not known."""
        thread = self._thread
        found = scheduled(thread=thread) if thread else None
        return self._waited_ns if found is None else self._waited_ns + found[1]


class FirstMeter(Meter):
    """Of the first stage of a run: what its worker waits for the others is counted with them."""

    __slots__ = ("_run",)

    def __init__(self, stage: str, tracer: Tracer, run: Any) -> None:
        super().__init__(stage, tracer)
        self._run = run

    @property
    def busy_ns(self) -> int:
        """Without the others' time."""
        return self._busy_ns

    @busy_ns.setter
    def busy_ns(self, total: int) -> None:
        others, self._run.others_ns = self._run.others_ns, 0
        Meter.busy_ns.fset(self, max(self._busy_ns, total - others))  # type: ignore[attr-defined]


@dataclass
class Worker:
    """One worker of a stage: its opened copy of the operator and its counters.

    Attributes:
        meter: of the stage.
        members: of each stage of the run that it works for, the first included.
        leaving: of the last stage of the run: what leaves was made by that.
        judged: of the stage of the run whose policy there is.
    """

    index: int
    operator: Any
    meter: Meter = field(default_factory=Meter)
    ticket: int = 0
    opened: bool = False
    leaves: bool = False
    """It ends with the unit that it has in work."""
    chain: list[Operator | Source] | None = None
    substituting: list[Operator | Source] = field(default_factory=list)
    """What was opened for substitutes, besides the operator."""
    initial: Any = None
    """The state a stateful operator starts each epoch with."""

    def __post_init__(self) -> None:
        self.leaving = self.judged = self.meter
        self.members: Sequence[Meter] = (self.meter,)

    def follow(self, plan: StagePlan, members: Sequence[Meter]) -> None:
        """It works for a run of stages, the plan's and its followers."""
        names = [plan.name, *(each.name for each in plan.followers)]
        self.members = members
        self.leaving, self.judged = members[-1], members[names.index(plan.judged)]
        self.operator.follow(names, members)

    def substitutes(self, stage: StageRun) -> list[Operator | Source]:
        """The source and one-to-one stages above, opened for substitutes at first need."""
        if self.chain is None:
            self.chain = open_substitutes(stage, self)
        return self.chain


@dataclass
class Restart:
    """How a stage resumes from a state, in the run's first epoch only."""

    step: int = 0
    drop: tuple[Cursor, int] | None = None
    cursor: Cursor = None
    base: Cursor = None
    marks: int = 0


class StageRun:
    """See the module docstring. Attributes are set by the run while it wires itself.

    Attributes:
        in_order: whether what leaves has a place; not in completion order.
        numbers_taken: whether items are numbered as workers take them, because several do or because each may fail.
        collects: whether it takes bundles into groups, and not rows.
        pack: how the ``Batch`` behind it wants bundles.
        jobs: batches whose rows the workers share; see ``row_parallel``.
        stop_epoch: the last epoch of which nothing more is wanted.
    """

    pace: Pace
    sender: Sender

    def __init__(self, plan: StagePlan, run: Run, depth: int) -> None:
        self.plan = plan
        self.name = plan.name
        self.run = run
        self.inboxes: list[Channel] = []
        self.above: list[StageRun] = []
        self.outboxes: list[list[Channel]] = [[]]
        self.senders: list[Sender] = []
        self.restart = Restart()
        stateful = isinstance(plan.operator, Operator) and plan.operator.stateful
        loops = plan.operator.kind in ("source", "map", "expand") and not isinstance(plan.operator, Elsewhere)
        self.account = run.account.stage(plan.name, depth, reserves=loops and not stateful)
        self.budgeted = final_policy(plan.spec.on_error) != "raise"
        budgeted = self.budgeted and not stateful
        self.by_ticket = plan.operator.kind in ("source", "map", "expand") and (plan.several or budgeted)
        self.in_order = not self.by_ticket or not plan.several or plan.spec.ordered
        self.numbers_taken = self.by_ticket and self.budgeted
        # A regrouping operator takes bundles as they are, unless it must have each row by itself.
        bundles = plan.operator.kind == "regroup" and plan.operator.bundles
        self.collects = bundles and not self.budgeted and not plan.remote
        self.pack: Callable[[list[Any]], Any] | None = None
        self.snapshots = Snapshots(plan.name, run.account.limit, run.account.keep)
        self.jobs: deque[Any] = deque()
        self.jobs_lock = threading.Lock()
        self.failures = Failures(self)
        self.ordinals = Ordinals(self)
        self.judging = threading.Lock()
        self.stop_epoch = -1

    def wire(self) -> None:
        """All channels are there: make what sends to them."""
        kind = Sender if not self.by_ticket else ByTicket if self.in_order else AsFinished
        self.senders = [kind(self, channels) for channels in self.outboxes]
        self.sender = self.senders[0]
        if self.by_ticket:
            self.inboxes[0].on_take = self._on_take
        if isinstance(self.sender, AsFinished):
            self.inboxes[0].may_take = self.sender.may_take

    def staff(self, workers: int, capacity: int) -> None:
        """So many workers take part from now on, and its queues hold so many items. Thread-safe."""
        for channel in self.inboxes:
            channel.set_readers(workers)
        for channel in (channel for output in self.outboxes for channel in output):
            channel.resize(capacity)
        if isinstance(self.sender, AsFinished):
            self.sender.set_window(workers, capacity)

    def _on_take(self, ticket: int, item: Any) -> None:
        """A worker takes an item; called in the order of tickets."""
        if self.numbers_taken:
            self.ordinals.number(ticket, item)
        if isinstance(self.sender, AsFinished):
            self.sender.on_take(ticket, item)

    def discard_input(self, index: int, epoch: int) -> None:
        """Nothing more of ``epoch`` is wanted from this input; stages above that feed nobody else stop too."""
        for chunk in self.inboxes[index].discard(epoch):
            self.run.account.release(chunk.buffers)
        if index < len(self.above):
            self.above[index].stop(epoch)

    def stop(self, epoch: int) -> None:
        """Make nothing more of ``epoch`` if every consumer has discarded it. Thread-safe."""
        wanted = any(not channel.discards(epoch) for output in self.outboxes for channel in output)
        if wanted or epoch <= self.stop_epoch:
            return
        self.stop_epoch = epoch
        for index in range(len(self.inboxes)):
            self.discard_input(index, epoch)

    # -- one item ------------------------------------------------------------------------------

    def attempt(self, worker: Worker, item: Chunk, call: Callable[[Chunk], Any], row: int = 0) -> Any:
        """What a call makes of an item, timed; where it fails, what the policy puts in the item's place.

        Args:
            row: which of its bundle's samples the item is.
        """
        start = perf_counter_ns()
        try:
            out = call(item)
            if out.__class__ is not Chunk:
                self.check_made(out)
        except BaseException as error:
            out = self.failures.handle(worker, item, error, row)
        worker.meter.busy_ns += perf_counter_ns() - start
        worker.meter.calls += 1
        try:
            return out
        finally:
            del out  # a failure: its traceback leads to this frame

    def check_made(self, out: Any) -> None:
        """Raise TypeError unless the stage may make this of an item."""
        operator = self.plan.operator
        rows = self.plan.remote and isinstance(
            operator, RowOperator
        )  # those of a batch have had their policy
        drops = rows or (isinstance(operator, Operator) and not operator.one_to_one)
        if not (isinstance(out, Chunk) or (drops and out is None) or (rows and isinstance(out, Failure))):
            raise not_a_chunk(out, self.name, "process", type(operator).__name__)

    def leave(
        self, worker: Worker, ticket: int, out: Any, held: Buffers, reserved: int, last: bool = True
    ) -> None:
        """Count and send what was made of an item: a chunk, a failure, or nothing.

        Args:
            held: the item's buffers.
            reserved: bytes, for what was made.
            last: whether it is the last of its ticket.
        """
        if out is None:
            worker.judged.dropped += 1
            self.drop(reserved, held)
            if last:
                self.sender.drop(ticket)
            return
        if isinstance(out, Chunk):
            worker.leaving.items += 1
            worker.leaving.samples += len(out.lineages)
        if held or reserved or out.__class__ is not Chunk or out.data.__class__ not in ATOMS:
            self.settle(worker, reserved, held, out)
        self.sender.send(ticket, out, last)

    # -- memory --------------------------------------------------------------------------------

    def settle(self, worker: Worker, reserved: int, held: Buffers, chunk: Any) -> None:
        """Count what a call has made of what it was given."""
        if isinstance(chunk, Chunk):
            chunk.buffers = buffers(chunk.data)
            chunk.nbytes = sum([nbytes for _, nbytes in chunk.buffers])
            worker.leaving.nbytes += chunk.nbytes
            self.run.account.settle(self.account, reserved, held, chunk.buffers)
        else:
            self.drop(reserved, held)

    def drop(self, reserved: int, held: Buffers) -> None:
        """A call has made nothing of what it was given."""
        if reserved or held:
            self.run.account.settle(self.account, reserved, held, ())
