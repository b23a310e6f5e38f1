"""Records worker events while a loader is traced.

Off, it costs the loops one look at an attribute. On, events are appended to a bounded queue, and nobody waits; the
oldest ones are dropped where there are too many.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

MAX_EVENTS = 400_000


@dataclass(frozen=True)
class Worked:
    """A stage's operator worked in a thread, until ``end_ns``."""

    thread: int
    stage: str
    end_ns: int
    took_ns: int


@dataclass(frozen=True)
class Sent:
    """A stage sent on what it made of these samples."""

    stage: str
    at_ns: int
    epoch: int
    lineages: Sequence[Any]


@dataclass(frozen=True)
class DeliveredEvent:
    """Training asked for a chunk and got it; its step lasts until it asks again."""

    thread: int
    asked_ns: int
    got_ns: int
    epoch: int
    lineages: Sequence[Any]


Event = Worked | Sent | DeliveredEvent


class Tracer:
    """Events of one loader; thread-safe. Whoever has one looks at ``on`` before each call."""

    def __init__(self) -> None:
        self.on = False
        self.ranges = False
        """Whether stages show as ranges in torch.profiler: read as workers open their operators, and at each call."""
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def worked(self, stage: str, took_ns: int) -> None:
        """The calling thread has just worked for so long."""
        self.events.append(Worked(threading.get_ident(), stage, perf_counter_ns(), took_ns))

    def sent(self, stage: str, item: Any) -> None:
        """A stage sends a chunk or a bundle."""
        self.events.append(Sent(stage, perf_counter_ns(), item.epoch, item.lineages))

    def delivered(self, asked_ns: int, item: Any) -> None:
        """The training loop gets a chunk or a bundle."""
        self.events.append(
            DeliveredEvent(threading.get_ident(), asked_ns, perf_counter_ns(), item.epoch, item.lineages)
        )
