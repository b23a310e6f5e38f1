"""Which stage holds training back: a pure function over waits.

The bottleneck is the last stage, going from source to sink, whose workers are busy while its input
is full and its output is empty. On every edge either the producer waits because the queue is full,
or the consumer because it is empty; whoever waits less is the slower of the two (its utilisation is
higher: Denning and Buzen, "The Operational Analysis of Queueing Network Models", 1978). So the walk
starts at the training loop and goes up for as long as the input is empty more than it is full.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONSUMER = "consumer"

NEGLIGIBLE = 0.02
"""A consumer that waits for less of its time than this is not held back: starting up alone takes some."""


@dataclass(frozen=True)
class EdgeFacts:
    """One edge of the graph while passes ran.

    Attributes:
        producer: a stage.
        consumer: a stage, or :data:`CONSUMER` for the training loop.
        empty: share 0..1 of the consumer's workers' time that they waited for this edge.
        full: share 0..1 of the producer's workers' time that they waited for room on it.
        inline: the producer runs in the consumer's thread, so that ``empty`` is the time it took.
    """

    producer: str
    consumer: str
    empty: float
    full: float
    inline: bool = False


def find_bottleneck(busy: Mapping[str, float], edges: Sequence[EdgeFacts]) -> str:
    """The stage that sets the pace, or :data:`CONSUMER` where training does.

    Args:
        busy: share 0..1 of its workers' time that each stage worked (or waited for memory to work
            in); ``CONSUMER`` for the training loop.
        edges: of the running graph, which has no cycle.

    >>> find_bottleneck(
    ...     {"read": 0.1, "decode": 1.0, "consumer": 0.2},
    ...     [EdgeFacts("read", "decode", 0.0, 0.9), EdgeFacts("decode", "consumer", 0.8, 0.0)],
    ... )
    'decode'
    """
    starved: dict[str, float] = defaultdict(float)
    for edge in edges:
        starved[edge.consumer] += edge.empty
    at = CONSUMER
    while True:
        inputs = [edge for edge in edges if edge.consumer == at]
        if not inputs:
            return at
        edge = max(inputs, key=lambda each: each.empty)
        # An inline producer never waits for room: the two take turns, and the longer turn sets the pace.
        against = busy[at] if edge.inline else edge.full
        # A producer that neither works nor waits has sent everything: what is left is the drain.
        held_back = min(edge.empty, busy[edge.producer] + starved[edge.producer])
        if held_back <= max(against, NEGLIGIBLE):
            return at
        at = edge.producer
