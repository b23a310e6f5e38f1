"""How fast the pipeline would be with other sizes. Pure.

A stage with period x (its work per chunk, shared by its workers) behind a producer with period y and a queue of n items
finds that queue empty with probability p, as in a birth-death process; it then waits y (tf.data's analytical model:
tensorflow/core/framework/model.cc). Its own period becomes x + p*y, and so on down to the training loop. Cores and the
GIL are shared by all.
"""

from __future__ import annotations

from pipegraph.tuning.facts import Facts, Sizes

TRAINING = "consumer"
"""The training loop, as profiles name it."""


def p_empty(consumer_s: float, producer_s: float, capacity: int) -> float:
    """Probability that a consumer with this period finds the queue of a producer with that period empty.

    >>> p_empty(1.0, 1.0, 4)
    0.2
    >>> p_empty(1.0, 0.0, 4), p_empty(0.0, 1.0, 4)
    (0.0, 1.0)
    """
    if producer_s <= 0:
        return 0.0
    if consumer_s <= 0:
        return 1.0
    ratio = consumer_s / producer_s
    if abs(ratio - 1) < 1e-9:
        return 1 / (capacity + 1)
    if ratio > 1:  # the same, without powers that overflow
        inverse = 1 / ratio
        return (1 - inverse) * inverse**capacity / (1 - inverse ** (capacity + 1))
    return (1 - ratio) / (1 - ratio ** (capacity + 1))


def period_s(facts: Facts, sizes: Sizes) -> float:
    """Seconds per delivered chunk that the model gives."""
    inputs: dict[str, list[str]] = {}
    for edge in facts.edges:
        inputs.setdefault(edge.consumer, []).append(edge.producer)
    periods: dict[str, float] = {}
    own: dict[str, float] = {}
    for name, stage in facts.stages.items():
        share = stage.work_s / (1 if stage.inline else stage.among(sizes).workers)
        waits = [_wait(share, above, periods, own, facts, sizes) for above in inputs.get(name, ())]
        own[name] = share
        periods[name] = share + max(waits, default=0.0)
    last = [_wait(facts.step_s, above, periods, own, facts, sizes) for above in inputs.get(TRAINING, ())]
    found = facts.step_s + max(last, default=0.0)
    bounds = [share for name, share in own.items() if not facts.stages[name].inline]
    locked = sum(stage.core_s for stage in facts.stages.values() if stage.locked)
    cores = max(facts.core_s, sum(stage.core_s for stage in facts.stages.values()))
    return max([found, locked, cores / facts.budget.cores, *bounds])


def _wait(
    share: float, above: str, periods: dict[str, float], own: dict[str, float], facts: Facts, sizes: Sizes
) -> float:
    """Expected wait for a producer. An inline one is driven by its consumer: it takes all of its time."""
    period = periods[above]
    if facts.stages[above].inline:
        return period
    return p_empty(share, period, facts.stages[above].among(sizes).capacity) * period


def predicted_rate(facts: Facts, now: Sizes, then: Sizes) -> float:
    """Chunks per second to expect: what was measured, times what the model makes of the change."""
    before, after = period_s(facts, now), period_s(facts, then)
    return facts.rate * before / after if after > 0 else facts.rate
