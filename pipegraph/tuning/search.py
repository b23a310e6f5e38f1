"""Which step to take next, and what becomes of it: decisions from windows of measurement. Pure.

One step at a time, the one with the largest predicted gain. A step raises the stage with the longest period, or makes a
queue longer where both ends wait for each other. Where one raise gains nothing, two, four and eight are tried together,
each for the stage that then has the longest period; and so too while predictions come true. Every step is measured: it
stays where throughput grew, and is taken back where it did not. When nothing is left to try, steps that were taken back
and still promise a gain get a second trial, beside a window of now: the first may have met a disturbance. Then sizes
that nobody needs are given back, and the tuner watches: work that has shifted opens the search again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipegraph.tuning.decisions import Decision, Tuning
from pipegraph.tuning.facts import Facts, Size, Sizes, fits
from pipegraph.tuning.model import period_s, predicted_rate

MIN_GAIN = 0.03
"""Predicted gains below this are not tried: measuring is no better than that."""

KEPT_GAIN = 0.015
"""Measured gain from which on a step stays."""

DOUBTFUL = 0.03
"""A measured gain this near to the border is measured once more."""

LOSS = 0.03
"""Measured loss up to which less is as good as more."""

MAX_STEPS = 8
"""Raises that are tried together, at most."""

AS_PREDICTED = 0.5
"""Part of the predicted gain from which on the prediction came true: the next step may be twice as long."""

NO_STALL = 0.02
"""A training loop that waits for less of its time has nothing to gain."""

SPARE = 0.6
"""A stage that would be busy for less than this part of the period with a worker less does not need it."""

SHIFT = 0.25
"""A change of rate or of a stage's work from which on everything is looked at again."""

SLOWER = 0.05
"""A loss since the search settled from which on it is opened again, if two windows show it: full queues had carried the
last steps further than their sizes do."""

REST = 8
"""Windows after which a settled search tries again; doubled each time."""


class Search:
    """Fed one window of facts after another; says what sizes to try. It begins with those of the tuned stages."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes: dict[str, Size] = dict(sizes)  # those that are kept
        self.decisions: list[Decision] = []
        self.advice: dict[str, str] = {}
        self.settled = False
        self._trial: tuple[Decision, dict[str, Size], Facts] | None = None
        self._measured = 0.0  # of the trial, so far
        self._distance = 1
        self._bold = False  # the distance has grown because predictions came true
        self._kept_needless: set[str] = set()
        self._holders: set[str] = set()  # stages that were no faster with more threads: they hold the lock
        self._rest, self._resting = REST, 0
        self._calm: Facts | None = None  # as it was when the search settled
        self._slower = 0  # windows in a row that were slower than that
        self._unlucky: set[tuple[tuple[str, Size], ...]] = set()
        self._again = False  # steps that were taken back have their second trial

    @property
    def tuning(self) -> Tuning:
        return Tuning(tuple(self.decisions), dict(self.sizes), tuple(self.advice.values()), self.settled)

    def next(self, facts: Facts) -> dict[str, Size]:
        """The sizes to have from now on, after a window in which those returned last were in force."""
        known = {name: replace(facts.stages[name], locked=True) for name in self._holders}
        facts = replace(facts, stages={**facts.stages, **known})
        for name, why in facts.refused.items():
            self.advice[f"refused {name}"] = f"{name}: a worker could not be started: {why}"
        for name, stage in facts.stages.items():
            if stage.locked and not stage.process:
                why = "holds the GIL while it works, so that more threads do not help"
                self.advice.setdefault(name, f"{name}: {why}; backend='process' would")
        if self._trial is not None:
            decided = self._judge(facts)
            if decided is None:
                return self._trial[1]
            if not decided:
                return self.sizes  # the next window shows them as they were
        if self._rests(facts):
            return self.sizes
        found = self._raise(facts) or self._give_back(facts)
        if found is None:
            self.settled, self._calm, self._resting, self._slower = True, facts, self._rest, 0
            self._rest *= 2
            return self.sizes
        then, why = found
        changes = {name: (self.sizes[name], size) for name, size in then.items() if size != self.sizes[name]}
        decision = Decision(changes, why, facts.rate, predicted_rate(facts, self.sizes, then))
        self.decisions.append(decision)
        self._trial, self._measured = (decision, then, facts), 0.0
        return then

    # -- judging -------------------------------------------------------------------------------

    def _judge(self, facts: Facts) -> bool | None:
        """Whether the step on trial stays; None: measure once more."""
        assert self._trial is not None
        decision, then, before = self._trial
        # A raise may lengthen queues with it, and a smaller stage never has a longer one.
        grows = any(
            (new.workers, new.capacity) > (old.workers, old.capacity)
            for old, new in decision.changes.values()
        )
        least = KEPT_GAIN if grows else -LOSS
        rate = facts.rate if not self._measured else (facts.rate + self._measured) / 2
        gain = rate / before.rate - 1 if before.rate else 1.0
        if not self._measured and not facts.refused and abs(gain - least) < DOUBTFUL:
            self._measured = facts.rate
            return None
        kept = gain >= least and not any(name in decision.changes for name in facts.refused)
        self._trial = None
        outcome = "kept" if kept else "refused" if facts.refused else "taken back"
        self.decisions[-1] = replace(decision, after=rate, outcome=outcome)  # type: ignore[arg-type]
        if kept:
            self.sizes = dict(then)
            self._bold = grows and gain >= AS_PREDICTED * (decision.predicted / decision.before - 1)
            self._distance = min(MAX_STEPS, 2 * self._distance) if self._bold else 1
            self._rest = REST
            self._unlucky.clear()
            self._again = False
        elif grows:
            self._distance = 1 if self._bold else 2 * self._distance
            self._bold = False
            self._unlucky.add(_key(then))
            if not _shifted(before, facts, then):
                self._explain(decision, before, facts)
        else:
            self._kept_needless |= set(decision.changes)
        return kept

    def _explain(self, decision: Decision, before: Facts, facts: Facts) -> None:
        """Say why more threads of a stage that computes did not help, where it is the GIL."""
        for name, (old, new) in decision.changes.items():
            stage, cores = before.stages[name], before.budget.cores
            alone = before.core_s * before.rate < cores - 0.5
            if new.workers > old.workers and stage.computes and not stage.process and alone:
                self._holders.add(name)
                self.advice[name] = (
                    f"{name}: computes and was no faster with more threads, while cores were free: it holds the "
                    "GIL, and backend='process' would help"
                )

    # -- resting -------------------------------------------------------------------------------

    def _rests(self, facts: Facts) -> bool:
        """Whether a settled search stays so."""
        if not self.settled:
            return False
        assert self._calm is not None
        self._resting -= 1
        slower = facts.stall >= NO_STALL and facts.rate < self._calm.rate * (1 - SLOWER)
        self._slower = self._slower + 1 if slower else 0
        shifted = _shifted(self._calm, facts, self.sizes)
        if not shifted and self._slower < 2 and self._resting > 0:
            return True
        if shifted:
            self._rest = REST
            self._kept_needless.clear()
            self.advice = {name: why for name, why in self.advice.items() if name not in self._holders}
            self._holders.clear()
        self.settled, self._distance, self._bold, self._again = False, 1, False, False
        self._unlucky.clear()
        return False

    # -- steps ---------------------------------------------------------------------------------

    def _raise(self, facts: Facts) -> tuple[dict[str, Size], str] | None:
        """The step with the largest predicted gain, of the shortest distance that has one."""
        if facts.stall < NO_STALL:
            return None
        while self._distance <= MAX_STEPS:
            options = [
                (predicted_rate(facts, self.sizes, then), number, then, why)
                for number, (then, why) in enumerate(self._options(facts))
                if _key(then) not in self._unlucky
            ]
            if options:
                rate, _, then, why = max(options, key=lambda option: (option[0], -option[1]))
                if rate >= facts.rate * (1 + MIN_GAIN):
                    return then, why
            self._distance *= 2
        if self._again or not self._unlucky:
            return None
        self._unlucky.clear()
        self._distance, self._again = 1, True
        return self._raise(facts)

    def _options(self, facts: Facts) -> Iterator[tuple[dict[str, Size], str]]:
        raised = _raised(facts, self.sizes, self._distance)
        if raised is not None:
            yield raised, "it takes longest" if self._distance == 1 else "they take longest together"
        for edge in facts.edges:
            stage = facts.stages[edge.producer]
            size = self.sizes.get(edge.producer)
            if size is not None and stage.capacity and edge.empty and edge.full:
                more = Size(size.workers, 2 * size.capacity)
                then = {**self.sizes, edge.producer: more}
                if fits(facts, self.sizes, then) is None:
                    yield then, "its queue was both empty and full"

    def _give_back(self, facts: Facts) -> tuple[dict[str, Size], str] | None:
        """Fewer workers, or a shorter queue, where nobody would miss them."""
        period = max(period_s(facts, self.sizes), 1 / facts.rate if facts.rate else 0.0)
        for name, size in self.sizes.items():
            stage = facts.stages[name]
            if name in self._kept_needless:
                continue
            fewer = size.workers
            while fewer > 1 and stage.work_s / (fewer - 1) < SPARE * period:
                fewer -= 1
            if stage.workers and fewer < size.workers:
                return {**self.sizes, name: replace(size, workers=fewer)}, "fewer are enough"
            unused = all(edge.unused for edge in facts.edges if edge.producer == name)
            shorter = replace(size, capacity=max(size.capacity // 2, stage.queue_for(size.workers)))
            if stage.capacity and unused and shorter.capacity < size.capacity:
                return {**self.sizes, name: shorter}, "most of its queue was never used"
        return None


def _raised(facts: Facts, sizes: Sizes, distance: int) -> dict[str, Size] | None:
    """``distance`` more workers, each for the stage that then has the longest period; None if that does not help."""
    then = dict(sizes)
    for _ in range(distance):
        periods = {
            name: stage.work_s / stage.among(then).workers
            for name, stage in facts.stages.items()
            if not stage.inline
        }
        name = max(periods, key=lambda each: periods[each])
        stage = facts.stages[name]
        if name not in then or not stage.workers or (stage.locked and not stage.process):
            break
        workers = then[name].workers + 1
        more = {**then, name: Size(workers, max(then[name].capacity, stage.queue_for(workers)))}
        if fits(facts, sizes, more) is not None:
            break
        then = more
    return then if then != dict(sizes) else None


def _shifted(calm: Facts, now: Facts, sizes: Sizes) -> bool:
    """Whether the work of a stage that matters, or the training step, has changed since."""
    period = max(period_s(now, sizes), period_s(calm, sizes))
    for name, stage in now.stages.items():
        workers = 1 if stage.inline else stage.among(sizes).workers
        before, after = calm.stages[name].work_s / workers, stage.work_s / workers
        if abs(after - before) > SHIFT * max(before, after) and max(before, after) > period / 2:
            return True
    return abs(now.step_s - calm.step_s) > SHIFT * max(now.step_s, calm.step_s, period)


def _key(sizes: Sizes) -> tuple[tuple[str, Size], ...]:
    return tuple(sizes.items())
