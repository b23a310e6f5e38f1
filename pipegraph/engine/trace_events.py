"""The events of a traced loader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Worked(NamedTuple):
    """A stage's operator worked in a thread for ``took_ns``, until ``end_ns``."""

    thread: int
    stage: str
    end_ns: int
    took_ns: int


class Sent(NamedTuple):
    """A stage sent a chunk or bundle of these samples."""

    stage: str
    at_ns: int
    epoch: int
    lineages: Sequence[Any]


class DeliveredEvent(NamedTuple):
    """The training loop asked for a chunk and got it; its step lasts until it asks again."""

    thread: int
    asked_ns: int
    got_ns: int
    epoch: int
    lineages: Sequence[Any]


class Events(NamedTuple):
    """Recorded events; each kind is roughly in the order of time."""

    worked: Sequence[Worked] = ()
    sent: Sequence[Sent] = ()
    delivered: Sequence[DeliveredEvent] = ()
