"""One worker of a stage: its opened copy of the operator, and its counters. Lives as long as the loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipegraph.contracts import Operator, Source
from pipegraph.engine.meter import Meter
from pipegraph.planning.plan import StagePlan


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
