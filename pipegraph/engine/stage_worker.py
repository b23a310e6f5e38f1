"""A worker of a stage: its opened copy of the operator, and its counters. Lives as long as the loader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipegraph.engine.meter import Meter


@dataclass(eq=False, repr=False)
class Worker:
    """A worker of a stage: its opened copy of the operator and its counters.

    Attributes:
        meter: its counters.
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
