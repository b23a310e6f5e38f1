"""The context of a running stage: what its parts need from the stage and from its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pipegraph import concurrency
from pipegraph.contracts import Context, History
from pipegraph.engine.channel import Channel
from pipegraph.engine.memory import Account
from pipegraph.engine.stage.budgets import Ordinals
from pipegraph.engine.stage.epoch_limit import Horizon
from pipegraph.engine.stage.ledger import Ledger
from pipegraph.engine.stage_worker import Worker
from pipegraph.planning.plan import Plan, StagePlan
from pipegraph.stopping import Stopping


class RunContext(Protocol):
    """The interface of a run that its stages use."""

    plan: Plan
    seed: int
    rank: int
    world_size: int
    first_epoch: int
    history: History
    account: Account
    horizon: Horizon
    ledger: Ledger
    stopping: Stopping

    def fail(self, error: BaseException) -> None:
        """End the run with this error, unless it has ended already."""

    def context(self, stage: str, worker: int) -> Context:
        """The context with which a worker opens its operator."""


class StageContext:
    """See the module docstring.

    Attributes:
        in_order: whether outputs leave in the order of their inputs, not as they finish.
        numbers_taken: whether items are numbered as workers take them: there are several workers, or an error budget.
        judging: held while a failure is checked against the stage's budget.
        stop_epoch: the last epoch whose remaining items are not wanted.
        wait_turn: blocks until every earlier ticket has left.
    """

    wait_turn: Callable[[int], None]

    def __init__(self, plan: StagePlan, run: RunContext) -> None:
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

    def number(self, worker: Worker, item: object) -> None:
        """Number an item of a stage with a budget and a single worker that does not use ``take``."""
        if self.budgeted:
            self.ordinals.forget(worker.ticket)
            worker.ticket += 1
            self.ordinals.number(worker.ticket, item)
