"""A worker of a stage: its opened copy of the operator, and its counters. Lives as long as the loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipegraph.engine.meter import Meter
from pipegraph.planning.plan import StagePlan


@dataclass(eq=False, repr=False)
class Worker:
    """A worker of a stage: its opened copy of the operator and its counters.

    Attributes:
        meter: the stage's meter.
        members: the meters of all fused stages that it works for, including the first.
        leaving: the meter of the last fused stage, which makes what is sent.
        judged: the meter of the fused stage that has an error policy.
    """

    index: int
    operator: Any
    meter: Meter = field(default_factory=Meter)
    ticket: int = 0
    opened: bool = False
    leaves: bool = False
    """Whether the worker ends after its current unit of work."""
    initial: Any = None
    """The state with which a stateful operator starts each epoch."""

    def __post_init__(self) -> None:
        self.leaving = self.judged = self.meter
        self.members: Sequence[Meter] = (self.meter,)

    def follow(self, plan: StagePlan, members: Sequence[Meter]) -> None:
        """Set the meters for several fused stages: the plan's own and its followers."""
        names = [plan.name, *(each.name for each in plan.followers)]
        self.members = members
        self.leaving, self.judged = members[-1], members[names.index(plan.judged)]
        self.operator.follow(names, members)
