"""One stage of a run: its channels and the state that its loops share.

A ``StageRun`` lives as long as one run (from a pass's start until it is cancelled or replaced); its
``Worker``s, with their opened operators, live as long as the loader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from pipegraph import concurrency
from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, Failure
from pipegraph.engine.channel import Channel
from pipegraph.engine.memory import Buffers
from pipegraph.engine.stage.bundle_size import Pace
from pipegraph.engine.stage.failure_notes import not_a_chunk
from pipegraph.engine.stage.failure_policy import Failures
from pipegraph.engine.stage.read_positions import ReadPositions
from pipegraph.engine.stage.sender import AsFinished, ByTicket, Sender
from pipegraph.engine.stage.snapshots import Snapshots
from pipegraph.engine.stage.stage_context import RunContext, StageContext
from pipegraph.engine.stage_worker import Worker
from pipegraph.planning.kind import Restart
from pipegraph.planning.plan import StagePlan
from pipegraph.tree import ATOMS, buffers


class StageRun(StageContext):
    """See the module docstring. Attributes are set by the run while it wires itself.

    Attributes:
        collects: whether it takes whole bundles into groups, not single rows.
        pack: packs bundles as the next ``Batch`` needs them.
        unpacked_below: whether the next stage makes the rows of packed bundles, as processes do.
        jobs: batches whose rows the workers share; see ``row_parallel``.
        drawing_ns: time that a sampler has taken for positions, written by the one thread that drives it.
        draws_since_ns: when the call began that it is in; 0 if it is in none.
    """

    pace: Pace
    sender: Sender

    def __init__(self, plan: StagePlan, run: RunContext) -> None:
        super().__init__(plan, run)
        self.above: list[StageRun] = []
        self.outboxes: list[list[Channel]] = [[]]
        self.senders: list[Sender] = []
        self.restart = Restart()
        # A regrouping operator takes whole bundles, unless it needs each row by itself.
        collects = plan.kind.collects and plan.traits.blocks
        self.collects = collects and not self.budgeted and not plan.remote
        self.pack: Callable[[list[Any]], Any] | None = None
        self.unpacked_below = False
        self.snapshots = Snapshots(plan.name, run.account.limit, run.account.keep)
        self.read_positions = ReadPositions()
        self.jobs: deque[Any] = deque()
        self.jobs_lock = concurrency.Lock()
        self.drawing_ns = self.draws_since_ns = 0
        self.failures = Failures(self)

    def wire(self) -> None:
        """Make the sender, once all channels are there."""
        kind = Sender if not self.by_ticket else ByTicket if self.in_order else AsFinished
        self.senders = [kind(self, self.failures, channels) for channels in self.outboxes]
        self.sender = self.senders[0]
        self.wait_turn = self.sender.wait_turn
        if self.by_ticket:
            self.inboxes[0].on_take = self._on_take
        if isinstance(self.sender, AsFinished):
            self.inboxes[0].may_take = self.sender.may_take

    def staff(self, workers: int, capacity: int) -> None:
        """Apply the stage's number of workers and the capacity of its queues. Thread-safe."""
        for channel in self.inboxes:
            channel.readers = workers
        for channel in (channel for output in self.outboxes for channel in output):
            channel.resize(capacity)
        if isinstance(self.sender, AsFinished):
            self.sender.set_window(workers, capacity)

    def _on_take(self, ticket: int, item: Any) -> None:
        """Record that a worker takes an item; called in the order of tickets."""
        if self.numbers_taken:
            self.ordinals.number(ticket, item)
        if isinstance(self.sender, AsFinished):
            self.sender.on_take(ticket, item)

    def discard_input(self, index: int, epoch: int) -> None:
        """Drop the rest of ``epoch`` from this input; stages above without another consumer stop too."""
        for chunk in self.inboxes[index].discard(epoch):
            self.run.account.release(chunk.buffers)
        if index < len(self.above):
            self.above[index].stop(epoch)

    def stop(self, epoch: int) -> None:
        """Stop making items of ``epoch`` if every consumer has discarded it. Thread-safe."""
        wanted = any(not channel.discards(epoch) for output in self.outboxes for channel in output)
        if wanted or epoch <= self.stop_epoch:
            return
        self.stop_epoch = epoch
        for index in range(len(self.inboxes)):
            self.discard_input(index, epoch)

    # -- one item ------------------------------------------------------------------------------

    def attempt(self, worker: Worker, item: Chunk, call: Callable[[Chunk], Any], row: int = 0) -> Any:
        """Call ``call`` on an item, timed; returns its result, or what the policy puts in place of a failed item.

        Args:
            row: index of the item in its bundle.
        """
        meter = worker.meter
        meter.began_ns = perf_counter_ns()
        try:
            out = call(item)
            if out.__class__ is not Chunk:
                self.check_made(out)
        except BaseException as error:
            out = self.failures.handle(worker, item, error, row)
        meter.worked(perf_counter_ns() - meter.began_ns)
        meter.calls += 1
        try:
            return out
        finally:
            del out  # a failure's traceback refers to this frame

    def check_made(self, out: Any) -> None:
        """Raise TypeError if an item's result is not of an allowed type."""
        plan = self.plan
        judged = plan.remote and plan.kind.judges_rows  # it has applied the policy
        drops = judged or not (plan.source is not None or plan.work.one_to_one)
        if not (isinstance(out, Chunk) or (drops and out is None) or (judged and isinstance(out, Failure))):
            raise not_a_chunk(out, self.name, "process", type(plan.operator).__name__)

    def leave(self, worker: Worker, ticket: int, out: Any, held: Buffers, last: bool = True) -> None:
        """Count and send the result of an item: a chunk, a failure, or None.

        Args:
            held: the item's buffers.
            last: whether it is the ticket's last result.
        """
        if out is None:
            worker.meter.dropped += 1
            self.run.account.release(held)
            if last:
                self.sender.drop(ticket)
            return
        if isinstance(out, Chunk):
            worker.meter.items += 1
            worker.meter.samples += len(out.lineages)
        if held or out.__class__ is not Chunk or out.data.__class__ not in ATOMS:
            self.settle(worker, held, out)
        self.sender.send(ticket, out, last)

    def batches_of(self, bundle: Bundle) -> list[tuple[int, int]]:
        """From where to where each batch of the next ``Batch`` lies in a bundle of a source's consecutive steps."""
        if bundle.places is not None or bundle.count <= 1:
            return [(0, bundle.count)]
        first = self.restart.step if bundle.epoch == self.run.first_epoch else 0
        return self.pace.groups(bundle.before - first, bundle.count)

    # -- memory --------------------------------------------------------------------------------

    def settle(self, worker: Worker, held: Buffers, chunk: Any) -> None:
        """Account for a result: release ``held``, count the chunk's buffers."""
        if isinstance(chunk, Chunk):
            chunk.buffers = buffers(chunk.data)
            chunk.nbytes = sum([nbytes for _, nbytes in chunk.buffers])
            worker.meter.nbytes += chunk.nbytes
            self.run.account.settle(held, chunk.buffers)
        else:
            self.run.account.release(held)
