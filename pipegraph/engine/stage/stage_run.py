"""One stage of a run: its channels, its account, and what its loops share.

A ``StageRun`` lives as long as one run (from a pass's start until it is cancelled or replaced); its
``Worker``s, with their opened operators, live as long as the loader.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pipegraph.chunk import Chunk, Cursor, EndOfEpoch, Mark
from pipegraph.contracts import Context, Operator, Source
from pipegraph.durations import Stopwatch
from pipegraph.engine.activity import Activity, Cancelled
from pipegraph.engine.channel import Channel
from pipegraph.engine.memory import Account, Buffers
from pipegraph.engine.stage.failure_policy import Failures, not_a_chunk, open_substitutes
from pipegraph.engine.stage.ledger import Ledger
from pipegraph.engine.stage.ordinals import Ordinals
from pipegraph.engine.stage.snapshots import Snapshots
from pipegraph.engine.stage.watermark import Watermark
from pipegraph.machine import scheduled
from pipegraph.planning.isolation import Elsewhere
from pipegraph.planning.plan import Plan, StagePlan
from pipegraph.policies import final_policy
from pipegraph.tree import buffers, copy_containers

if TYPE_CHECKING:
    from pipegraph.engine.stage.bundle_size import Pace
    from pipegraph.engine.stage.epoch_limit import Horizon


class Meter:
    """One worker's counters. Written by that worker alone, read by anyone: a torn view is one item off."""

    __slots__ = (
        "_busy_ns",
        "_clock",
        "_cpu_ns",
        "_note",
        "_thread",
        "_waited_ns",
        "calls",
        "dropped",
        "failed",
        "items",
        "nbytes",
        "retried",
        "samples",
        "watch",
    )

    def __init__(self) -> None:
        self._clock: int | None = (
            None  # of its thread's time on a core, read by whoever asks: items pay nothing
        )
        self._cpu_ns = 0
        self._thread = 0  # its number in the system, whose scheduler knows how long it waited for a core
        self._waited_ns = 0
        self._busy_ns = 0
        self.watch = Stopwatch()
        self._note = self.watch.note
        self.calls = 0
        self.items = 0
        self.samples = 0
        self.nbytes = 0
        self.dropped = 0
        self.failed = 0
        self.retried = 0

    @property
    def busy_ns(self) -> int:
        """Nanoseconds of work; what it grows by is how long one call took."""
        return self._busy_ns

    @busy_ns.setter
    def busy_ns(self, total: int) -> None:
        self._note(total - self._busy_ns)
        self._busy_ns = total
        self.watch.count()

    def values(self) -> tuple[int, ...]:
        """All counters, as :meth:`of` takes them."""
        return (
            *(self.busy_ns, self.calls, self.items, self.samples, self.nbytes),
            *(self.dropped, self.failed, self.retried, self.cpu_ns(), self.waited_ns()),
        )

    @staticmethod
    def of(values: Sequence[int]) -> Meter:
        """A meter that shows these."""
        meter = Meter()
        meter._busy_ns, meter.calls, meter.items, meter.samples, meter.nbytes = values[:5]
        meter.dropped, meter.failed, meter.retried, meter._cpu_ns, meter._waited_ns = values[5:]
        return meter

    def thread_begins(self) -> None:
        """Called by the worker's own thread; an inline stage has none, nor have all systems such clocks."""
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._thread = threading.get_native_id()

    def thread_ends(self) -> None:
        """Called by the worker's own thread, whose clock ends with it."""
        self._cpu_ns, self._clock = self.cpu_ns(), None
        self._waited_ns, self._thread = self.waited_ns(), 0

    def cpu_ns(self) -> int:
        """How long the thread has run on a core so far; 0 where that is not known."""
        clock = self._clock
        if clock is not None:
            try:
                return time.clock_gettime_ns(clock)
            except OSError:  # the thread has just ended, or lives on in the process that forked this one
                pass
        return self._cpu_ns

    def waited_ns(self) -> int:
        """How long the thread has been ready to run and had no core so far; 0 where that is not known."""
        thread = self._thread
        found = scheduled(thread=thread) if thread else None
        return self._waited_ns if found is None else found[1]


@dataclass
class Worker:
    """One worker of a stage: its opened copy of the operator and its counters."""

    index: int
    operator: Any
    meter: Meter = field(default_factory=Meter)
    ticket: int = 0
    opened: bool = False
    chain: list[Operator | Source] | None = None
    substituting: list[Operator | Source] = field(default_factory=list)
    """What was opened for substitutes, besides the operator."""
    initial: Any = None
    """The state a stateful operator starts each epoch with."""

    def substitutes(self, stage: StageRun) -> list[Operator | Source]:
        """The source and one-to-one stages above, opened for substitutes at first need."""
        if self.chain is None:
            self.chain = open_substitutes(stage, self)
        return self.chain


class RunFacts(Protocol):
    """What a stage needs of its run."""

    plan: Plan
    account: Account
    activity: Activity
    horizon: Horizon
    ledger: Ledger
    seed: int
    rank: int
    world_size: int
    first_epoch: int
    stopping: threading.Event

    def fail(self, error: BaseException) -> None:
        """End the run with this error."""

    def context(self, stage: str, worker: int) -> Context:
        """What a worker's operator is opened with."""


@dataclass
class Restart:
    """How a stage goes on from a state, in the run's first epoch only."""

    step: int = 0
    drop: tuple[Cursor, int] | None = None
    cursor: Cursor = None
    base: Cursor = None
    marks: int = 0


class StageRun:
    """See the module docstring. Attributes are set by the runtime while it wires the run."""

    def __init__(self, plan: StagePlan, run: RunFacts, depth: int) -> None:
        self.plan = plan
        self.name = plan.name
        self.run = run
        self.inboxes: list[Channel] = []
        self.above: list[StageRun] = []
        self.outboxes: list[list[Channel]] = [[]]
        self.restart = Restart()
        stateful = isinstance(plan.operator, Operator) and plan.operator.stateful
        loops = plan.operator.kind in ("source", "map", "expand") and not isinstance(plan.operator, Elsewhere)
        self.account = run.account.stage(plan.name, depth, reserves=loops and not stateful)
        self.budgeted = final_policy(plan.spec.on_error) != "raise"
        self.pooled = plan.operator.kind in ("source", "map", "expand") and (
            plan.workers > 1 or (self.budgeted and not stateful)
        )
        self.pace: Pace | None = None  # where rows are handed over in bundles; see bundles.py
        self.pack: Callable[[list[Any]], Any] | None = None  # how the ``Batch`` behind it wants bundles
        self.snapshots = Snapshots(plan.name, run.account.limit, run.account.keep)
        self.jobs: deque[Any] = deque()  # batches whose rows the workers share; see rows.py
        self.jobs_lock = threading.Lock()
        self.unordered = self.pooled and plan.workers > 1 and not plan.spec.ordered
        self.failures = Failures(self)
        self.ordinals = Ordinals(self)
        self.forget = self.ordinals.forget
        self.judging = threading.Lock()
        self.stop_epoch = -1
        self._open: dict[int, int] = {}
        self._ending: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._marks: dict[int, list[Watermark]] = {}

    # -- sending -------------------------------------------------------------------------------

    def putter(self, output: int = 0) -> Callable[[Any], bool]:
        """``put`` of this stage's output: of the one channel, or of all of a fan-out."""
        return self.failures.judging(self._putter(self.outboxes[output]))

    def _putter(self, channels: list[Channel]) -> Callable[[Any], bool]:
        if len(channels) == 1:
            return channels[0].put
        if not channels:
            return self._nobody

        def put_all(item: Any) -> bool:
            return self._fan_out(item, channels, lambda index, each: channels[index].put(each))

        return put_all

    def lane_putter(self) -> Callable[[int, Any, bool], bool]:
        """``put_at`` of this stage's output."""
        return self.failures.judging_lanes(self._lane_putter())

    def _lane_putter(self) -> Callable[[int, Any, bool], bool]:
        channels = self.outboxes[0]
        if len(channels) == 1:
            return channels[0].put_at

        def put_all(lane: int, item: Any, last: bool) -> bool:
            return self._fan_out(item, channels, lambda index, each: channels[index].put_at(lane, each, last))

        return put_all

    def close_lane(self, lane: int) -> None:
        """Nothing (more) comes of this ticket."""
        for channel in self.outboxes[0]:
            channel.close_lane(lane)

    def _nobody(self, item: Any) -> bool:
        return not isinstance(item, Chunk)

    def _fan_out(self, item: Any, channels: list[Channel], put: Callable[[int, Any], bool]) -> bool:
        if not isinstance(item, Chunk):
            for index in range(len(channels)):
                put(index, item)
            return True
        if item.buffers:
            self.run.account.hold(item.buffers, len(channels) - 1)
        refused = 0
        for index in range(1, len(channels)):
            share = item.replace(copy_containers(item.data))
            share.buffers, share.nbytes, share.packed = item.buffers, item.nbytes, item.packed
            if not put(index, share):
                self.run.account.release(share.buffers)
                refused += 1
        if not put(0, item):
            self.run.account.release(item.buffers)
            refused += 1
        if refused == len(channels):
            item.buffers = ()
        return refused < len(channels)

    def unwanted(self, item: Any) -> None:
        """A put was refused: the chunk is gone."""
        if isinstance(item, Chunk):
            self.run.account.release(item.buffers)

    def discard_input(self, index: int, epoch: int) -> None:
        """Nothing more of ``epoch`` is wanted from this input; stages above that feed nobody else stop too."""
        for chunk in self.inboxes[index].discard(epoch):
            self.run.account.release(chunk.buffers)
        if index < len(self.above):
            self.above[index].stop(epoch)

    def stop(self, epoch: int) -> None:
        """Make nothing more of ``epoch`` if every consumer has discarded it; any thread calls this."""
        wanted = any(not channel.discards(epoch) for output in self.outboxes for channel in output)
        if wanted or epoch <= self.stop_epoch:
            return
        self.stop_epoch = epoch
        for index in range(len(self.inboxes)):
            self.discard_input(index, epoch)

    def check_made(self, out: Any) -> None:
        """Raise TypeError unless a map stage may make this of an item."""
        operator = self.plan.operator
        drops = isinstance(operator, Operator) and not operator.one_to_one
        if not isinstance(out, Chunk) and not (out is None and drops):
            raise not_a_chunk(out, self.name, "process", type(operator).__name__)

    # -- memory --------------------------------------------------------------------------------

    def settle(self, worker: Worker, reserved: int, held: Buffers, chunk: Any) -> None:
        """Count what a call has made of what it was given."""
        if isinstance(chunk, Chunk):
            chunk.buffers = buffers(chunk.data)
            chunk.nbytes = sum([nbytes for _, nbytes in chunk.buffers])
            worker.meter.nbytes += chunk.nbytes
            self.run.account.settle(self.account, reserved, held, chunk.buffers)
        else:
            self.drop(reserved, held)

    def drop(self, reserved: int, held: Buffers) -> None:
        """A call has made nothing of what it was given."""
        if reserved or held:
            self.run.account.settle(self.account, reserved, held, ())

    def first_in_line(self, ticket: int) -> bool:
        """Whether a pooled stage's item is the next to leave it."""
        if not self.unordered:
            return self.outboxes[0][0].at_head(ticket)
        with self._lock:
            return next(iter(self._open), ticket) == ticket

    def moved(self) -> None:
        """A ticket is done: whoever waits for memory may be the first in line now."""
        if self.account.guarded:
            self.run.account.nudge()

    # -- tickets -------------------------------------------------------------------------------

    def on_take(self, hook: Callable[[int, Any], None]) -> None:
        """Have ``hook`` called with the ticket and the item whenever one is taken."""
        inbox = self.inboxes[0]
        before = inbox.on_take
        if before is None:
            inbox.on_take = hook
        else:
            first = before

            def both(ticket: int, item: Any) -> None:
                first(ticket, item)
                hook(ticket, item)

            inbox.on_take = both

    def wait_turn(self, ticket: int) -> None:
        """Blocks until every earlier item of an ordered stage has left."""
        if self.pooled and not self.unordered:
            self.outboxes[0][0].wait_turn(ticket)

    # -- completion order ----------------------------------------------------------------------

    def track_tickets(self) -> None:
        """Watermarks per epoch and outbox, epoch barriers and the reorder window, for completion order."""
        inbox = self.inboxes[0]
        window = 4 * (self.plan.workers + self.plan.capacity)

        def on_take(ticket: int, item: Any) -> None:
            if isinstance(item, Chunk | Mark):
                with self._lock:
                    marks = self._marks.get(item.epoch)
                    if marks is None:
                        marks = self._marks[item.epoch] = [Watermark() for _ in self.outboxes[0]]
                    for mark in marks:
                        mark.start(ticket, item.before, item.after)
                    self._open[ticket] = item.epoch

        def may_take(ticket: int) -> bool:
            with self._lock:
                for oldest in self._open:
                    return ticket - oldest < window
                return True

        self.on_take(on_take)
        inbox.may_take = may_take

    def _lane(self, epoch: int) -> int:
        """In a completion-order stage a lane is an epoch: chunks of one leave in any order."""
        return epoch - self.run.first_epoch

    def token_unordered(self, ticket: int, token: Any) -> None:
        """Pass a token on in completion order."""
        if isinstance(token, EndOfEpoch):
            self.end_epoch(token)
        elif isinstance(token, Mark):  # it keeps its place as far as there are places
            marks = self._marks[token.epoch]
            for channel, watermark in zip(self.outboxes[0], marks, strict=True):
                mark = Mark(token.route, token.turn, token.epoch, token.before, token.after)
                channel.put_stamped(
                    self._lane(token.epoch), mark, _Stamp(watermark, self._lock, ticket, True)
                )
            self.finish_ticket(ticket)
        else:
            self.run.fail(token.error)  # a failure has no place here
            raise Cancelled

    def put_unordered(self, ticket: int, chunk: Chunk, last: bool) -> bool:
        """Put a chunk of ``ticket`` as it finishes, with the watermark of its moment as cursors."""
        lane = self._lane(chunk.epoch)
        channels = self.outboxes[0]
        marks = self._marks[chunk.epoch]

        def put(index: int, each: Chunk) -> bool:
            return channels[index].put_stamped(lane, each, _Stamp(marks[index], self._lock, ticket, last))

        if len(channels) == 1:
            return put(0, chunk)
        return self._fan_out(chunk, channels, put)

    def finish_ticket(self, ticket: int) -> None:
        """All items of a ticket have been put; perhaps its epoch can end."""
        ending = None
        with self._lock:
            epoch = self._open.pop(ticket)
            for mark in self._marks.get(epoch, ()):
                mark.finish(ticket)
            if epoch in self._ending and epoch not in self._open.values():
                ending = self._ending.pop(epoch)
        self.inboxes[0].nudge()
        self.moved()
        if ending is not None:
            self._end_lane(ending)

    def end_epoch(self, token: Any) -> None:
        """The input's epoch is over; the output's is once every open ticket of it is finished."""
        with self._lock:
            if token.epoch in self._open.values():
                self._ending[token.epoch] = token
                return
        self._end_lane(token)

    def _end_lane(self, token: Any) -> None:
        failure = self.failures.at_end(token.epoch)
        if failure is not None:
            self.run.fail(failure.error)
            raise Cancelled
        with self._lock:
            self._marks.pop(token.epoch, None)
        for channel in self.outboxes[0]:
            channel.put_at(self._lane(token.epoch), token, True)


class _Stamp:
    """Sets a chunk's cursors at the moment it is put; runs under the channel's lock."""

    __slots__ = ("_last", "_lock", "_mark", "_ticket")

    def __init__(self, mark: Watermark, lock: threading.Lock, ticket: int, last: bool) -> None:
        self._mark = mark
        self._lock = lock
        self._ticket = ticket
        self._last = last

    def __call__(self, chunk: Chunk | Mark) -> None:
        with self._lock:
            chunk.before = self._mark.current()
            chunk.after = self._mark.finish(self._ticket) if self._last else chunk.before
