"""The events of a traced loader, and their recorder.

Off, it costs a loop one attribute access. On, it appends the values of an event to a bounded queue, without waiting;
when the queue is full the oldest events are dropped. Event objects are made only when read: every live object brings
the next full garbage collection closer, which costs far more than recording.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

from pipegraph import concurrency
from pipegraph.chunk import Chunk, Lineage

MAX_EVENTS = 200_000
"""Events of each kind that are kept."""


class Worked(NamedTuple):
    """A stage's operator worked in a thread for ``took_ns``, until ``end_ns``."""

    thread: int
    stage: str
    end_ns: int
    took_ns: int


class DeliveredEvent(NamedTuple):
    """The training loop asked for a chunk and got it; its step lasts until it asks again."""

    thread: int
    asked_ns: int
    got_ns: int
    epoch: int
    lineages: Sequence[Lineage]


class Events(NamedTuple):
    """Recorded events; each kind is roughly in the order of time."""

    worked: Sequence[Worked] = ()
    delivered: Sequence[DeliveredEvent] = ()


class Tracer:
    """Records the events of one loader. Thread-safe; callers check ``on`` before each call."""

    def __init__(self) -> None:
        self.on = False
        # The values of one kind's events, laid out flat: ``extend`` with one event is atomic.
        self._worked: deque[object] = deque(maxlen=4 * MAX_EVENTS)
        self._delivered: deque[object] = deque(maxlen=5 * MAX_EVENTS)

    def take(self) -> Events:
        """The events since the last call; call it while ``on`` is False."""
        return Events(_take(Worked, self._worked), _take(DeliveredEvent, self._delivered))

    def worked(self, stage: str, took_ns: int) -> None:
        """The calling thread has just worked for ``took_ns``."""
        self._worked.extend((concurrency.get_ident(), stage, perf_counter_ns(), took_ns))

    def delivered(self, asked_ns: int, item: Chunk) -> None:
        """The training loop gets a chunk or a bundle."""
        self._delivered.extend(
            (concurrency.get_ident(), asked_ns, perf_counter_ns(), item.epoch, item.lineages)
        )


def _take(kind: Any, queue: deque[object]) -> list[Any]:
    values = iter(queue.copy())
    queue.clear()
    return [kind(*event) for event in zip(*[values] * len(kind._fields), strict=True)]
