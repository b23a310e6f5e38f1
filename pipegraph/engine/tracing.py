"""Records worker events while a loader is traced.

Off, it costs the loops one look at an attribute. On, the values of an event are appended to a bounded queue, and nobody
waits; the oldest events are dropped where there are too many. Nothing is made of them before they are read: each object
that is kept makes the garbage collector look through the whole program sooner, which costs far more than recording.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import get_ident
from time import perf_counter_ns
from typing import Any, NamedTuple

MAX_EVENTS = 200_000
"""Of each kind."""


class Worked(NamedTuple):
    """A stage's operator worked in a thread, until ``end_ns``."""

    thread: int
    stage: str
    end_ns: int
    took_ns: int


class Sent(NamedTuple):
    """A stage sent on what it made of these samples."""

    stage: str
    at_ns: int
    epoch: int
    lineages: Sequence[Any]


class DeliveredEvent(NamedTuple):
    """Training asked for a chunk and got it; its step lasts until it asks again."""

    thread: int
    asked_ns: int
    got_ns: int
    epoch: int
    lineages: Sequence[Any]


class Events(NamedTuple):
    """What was recorded, each kind in about the order of time."""

    worked: Sequence[Worked] = ()
    sent: Sequence[Sent] = ()
    delivered: Sequence[DeliveredEvent] = ()


class Tracer:
    """Events of one loader; thread-safe. Whoever has one looks at ``on`` before each call."""

    def __init__(self) -> None:
        self.on = False
        self.ranges = False
        """Whether stages show as ranges in torch.profiler: read as workers open their operators, and at each call."""
        self._worked = _queue(Worked)
        self._sent = _queue(Sent)
        self._delivered = _queue(DeliveredEvent)

    def take(self) -> Events:
        """What was recorded since the last time; call it while ``on`` is False."""
        return Events(
            _take(Worked, self._worked), _take(Sent, self._sent), _take(DeliveredEvent, self._delivered)
        )

    def worked(self, stage: str, took_ns: int) -> None:
        """The calling thread has just worked for so long."""
        self._worked.extend((get_ident(), stage, perf_counter_ns(), took_ns))

    def sent(self, stage: str, item: Any) -> None:
        """A stage sends a chunk or a bundle."""
        self._sent.extend((stage, perf_counter_ns(), item.epoch, item.lineages))

    def delivered(self, asked_ns: int, item: Any) -> None:
        """The training loop gets a chunk or a bundle."""
        self._delivered.extend((get_ident(), asked_ns, perf_counter_ns(), item.epoch, item.lineages))


def _queue(kind: Any) -> deque[Any]:
    """For the values of events of one kind, one event behind the other: ``extend`` with one event is atomic."""
    return deque(maxlen=MAX_EVENTS * len(kind._fields))


def _take(kind: Any, queue: deque[Any]) -> list[Any]:
    values = iter(queue.copy())
    queue.clear()
    return [kind(*event) for event in zip(*[values] * len(kind._fields), strict=True)]
