"""One stage of a run: its channels and the state that its loops share.

A ``StageRun`` lives as long as one run (from a pass's start until it is cancelled or replaced); its
``Worker``s, with their opened operators, live as long as the loader.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from pipegraph import concurrency
from pipegraph.bundle import Pack
from pipegraph.engine.channel import Channel
from pipegraph.engine.stage.budgets import Ordinals
from pipegraph.engine.stage.bundle_size import Pace
from pipegraph.engine.stage.failure_policy import Failures
from pipegraph.engine.stage.sender import AsFinished, ByTicket, Sender
from pipegraph.engine.stage.snapshots import Snapshots
from pipegraph.engine.stage_worker import Worker
from pipegraph.planning.kind import Restart
from pipegraph.planning.plan import StagePlan

if TYPE_CHECKING:
    from pipegraph.engine.run import Run


class StageRun:
    """See the module docstring. Attributes are set by the run while it wires itself.

    Attributes:
        budgeted: whether its policy has an error budget, for which its items are numbered.
        by_ticket: whether workers take items with tickets: several of them share the items, or a budget counts them.
        in_order: whether outputs leave in the order of their inputs, not as they finish.
        numbers_taken: whether ``take`` numbers the items for the budget; else the loop does, by :meth:`number`.
        judging: held while a failure is checked against the stage's budget.
        stop_epoch: the last epoch whose remaining items are not wanted.
        collects: whether it takes whole bundles into groups, not single rows.
        pack: packs bundles as the next ``Batch`` needs them.
        unpacked_below: whether the next stage makes the rows of packed bundles, as processes do.
        jobs: batches whose rows the workers share; see ``kinds.rows``.
        drawing_ns: time that a sampler has taken for positions, written by the one thread that drives it.
        draws_since_ns: when the call began that it is in; 0 if it is in none.
    """

    pace: Pace
    sender: Sender

    def __init__(self, plan: StagePlan, run: Run) -> None:
        self.plan = plan
        self.name = plan.name
        self.run = run
        self.inboxes: list[Channel] = []
        parallel = plan.kind.parallel
        self.budgeted = plan.spec.skip is not None
        self.by_ticket = parallel and (plan.several or self.budgeted)
        self.in_order = not self.by_ticket or not plan.several or plan.spec.ordered
        self.numbers_taken = self.by_ticket and self.budgeted
        self.ordinals = Ordinals(plan)
        self.judging = concurrency.Lock()
        self.stop_epoch = -1
        self.above: list[StageRun] = []
        self.outboxes: list[list[Channel]] = [[]]
        self.senders: list[Sender] = []
        self.restart = Restart()
        # A regrouping operator takes whole bundles, unless it needs each row by itself.
        collects = plan.kind.collects and plan.traits.blocks
        self.collects = collects and not self.budgeted and not plan.remote
        self.pack: Pack | None = None
        self.unpacked_below = False
        self.snapshots = Snapshots(plan.name, run.account.limit, run.account.keep)
        self.jobs: deque[Any] = deque()
        self.jobs_lock = concurrency.Lock()
        self.drawing_ns = self.draws_since_ns = 0
        self.failures = Failures(self)

    def wire(self) -> None:
        """Make the sender, once all channels are there."""
        kind = Sender if not self.by_ticket else ByTicket if self.in_order else AsFinished
        self.senders = [kind(self, channels) for channels in self.outboxes]
        self.sender = self.senders[0]
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

    def number(self, worker: Worker, item: object) -> None:
        """Number an item of a stage with a budget and a single worker that does not use ``take``."""
        self.ordinals.forget(worker.ticket)
        worker.ticket += 1
        self.ordinals.number(worker.ticket, item)

    def _on_take(self, ticket: int, item: object) -> None:
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
