"""Which step to take next, and what becomes of it: decisions from windows of measurement. Pure.

A step goes to the sizes that are best by the model (``profile.model``), and gives no stage more than four times the
workers that were measured; or it makes a queue longer where both ends wait for each other. Every step is measured: it
stays where throughput grew, and else is taken back. A shorter step is tried then, and where one worker more is no
faster either, the stage stays as it is. When nothing is left to try, the search has settled and the sizes stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pipegraph.profile.model import LONGER, Pipeline, Size, Sizes, best_sizes, exceeds, limit_words
from pipegraph.units import counted

MIN_GAIN = 0.03
"""Predicted gains below this are not tried: measuring is no better than that."""

KEPT_GAIN = 0.015
"""Measured gain from which on a step stays."""

DOUBTFUL = 0.03
"""A measured gain this near to the border is measured once more."""

STEPS = (4, 2, 1)
"""How many times as many workers a step may give; 1: one worker more. The next is tried where one gains nothing."""

NO_STALL = 0.02
"""A training loop that waits for less of its time has nothing to gain."""

SLOWER = 0.05
"""The part by which the bound of the best sizes must lie below the period, where the predicted gain is too small."""


@dataclass(frozen=True)
class Window:
    """What was measured with the sizes in force, which are those of the pipeline.

    Attributes:
        stall: share of its time that the training loop waited.
        bursts: stages whose queues were empty in turn with full.
        held: stages whose capacity the tuner may not change.
        refused: stages of which a worker could not be started, and why.
    """

    pipeline: Pipeline
    stall: float = 1.0
    bursts: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Chunks per second."""
        return 1 / self.pipeline.period_s if self.pipeline.period_s else 0.0


Step = tuple[dict[str, Size], str]


class Search:
    """Fed one window after another; says what sizes to try. It begins with those of the tuned stages."""

    def __init__(self, sizes: Mapping[str, Size]) -> None:
        self.sizes: dict[str, Size] = dict(sizes)  # those that are kept
        self.decisions: list[Decision] = []
        self.advice: dict[str, str] = {}
        self.limit = ""
        self.settled = False
        self._trial: tuple[Decision, dict[str, Size], Window] | None = None
        self._measured = 0.0  # of the trial, so far
        self._step = 0  # of ``STEPS``
        # Stages that were no faster with more workers, and how that was found.
        self._stuck: dict[str, str] = {}
        self._short: set[str] = set()  # stages that were no faster with longer queues

    @property
    def tuning(self) -> Tuning:
        advice = tuple(self.advice.values())
        return Tuning(tuple(self.decisions), dict(self.sizes), advice, self.settled, self.limit)

    def next(self, window: Window) -> dict[str, Size]:
        """The sizes to have from now on, after a window in which those returned last were in force."""
        for name, why in window.refused.items():
            self.advice[f"refused {name}"] = f"{name}: a worker could not be started: {why}"
        for name, work in window.pipeline.works.items():
            if work.locked:
                why = "holds the GIL while it works, so that more threads do not help"
                self.advice.setdefault(name, f"{name}: {why}; backend='process' would")
        if self._trial is not None:
            decided = self._judge(window)
            if decided is None:
                return self._trial[1]
            if not decided:
                return self.sizes  # the next window shows them as they were
        found = self._raise(window)
        if found is None:
            self.settled = True
            return self.sizes
        then, why = found
        changes = {name: (self.sizes[name], size) for name, size in then.items() if size != self.sizes[name]}
        predicted = window.pipeline.predicted(then)
        decision = Decision(changes, why, window.rate, min(predicted, 1e12))
        self.decisions.append(decision)
        self._trial, self._measured = (decision, then, window), 0.0
        return then

    # -- judging -------------------------------------------------------------------------------

    def _judge(self, window: Window) -> bool | None:
        """Whether the step on trial stays; None: measure once more."""
        assert self._trial is not None
        decision, then, before = self._trial
        rate = window.rate if not self._measured else (window.rate + self._measured) / 2
        gain = rate / before.rate - 1 if before.rate else 1.0
        if not self._measured and not window.refused and abs(gain - KEPT_GAIN) < DOUBTFUL:
            self._measured = window.rate
            return None
        kept = gain >= KEPT_GAIN and not any(name in decision.changes for name in window.refused)
        self._trial = None
        outcome = "kept" if kept else "refused" if window.refused else "taken back"
        self.decisions[-1] = replace(decision, after=rate, outcome=outcome)  # type: ignore[arg-type]
        if kept:
            self.sizes = dict(then)
        self._learn(decision, kept, window)
        return kept

    def _learn(self, decision: Decision, kept: bool, window: Window) -> None:
        """What a raise has shown of the stages that it changed."""
        raised = {
            name: (old.workers, new.workers)
            for name, (old, new) in decision.changes.items()
            if new.workers > old.workers
        }
        if kept:
            self._step, self.limit = 0, ""
            self._stuck.clear()
            self._short.clear()
        elif not raised:
            self._short |= set(decision.changes)
        elif (
            not window.refused
            and self._step + 1 < len(STEPS)
            and any(new > old + 1 for old, new in raised.values())
        ):
            self._step += 1
        else:
            self._step = 0
            for name, (old, new) in raised.items():
                refused = window.refused.get(name)
                self._stuck[name] = refused or f"{new} workers were no faster than {old}"

    # -- steps ---------------------------------------------------------------------------------

    def _raise(self, window: Window) -> Step | None:
        """The step towards the best sizes, if it promises enough."""
        if window.stall < NO_STALL:
            self.limit = "training hardly waits"
            return None
        pipeline = window.pipeline
        sizes, limit, why = best_sizes(pipeline, STEPS[self._step], self._stuck)
        then = {name: sizes[name] for name in self.sizes}
        predicted, (least_s, _) = pipeline.predicted(then), pipeline.bound(then)
        # Stages that are nearly as loaded as the limit make it wait in turn: with a few workers more it is reached.
        promises = predicted >= window.rate * (1 + MIN_GAIN) or least_s < pipeline.period_s * (1 - SLOWER)
        if then != self.sizes and promises:
            return then, "best by the model" if STEPS[self._step] > 1 else "one more each"
        for name, size in self.sizes.items():
            if name in window.bursts - window.held - self._short:
                then = {**self.sizes, name: replace(size, capacity=LONGER * size.capacity)}
                if exceeds(pipeline, then) is None:
                    return then, "its queue was sometimes empty and sometimes full"
        self.limit = limit_words(limit, why)
        return None


Outcome = Literal["kept", "taken back", "on trial", "refused"]


@dataclass(frozen=True)
class Decision:
    """One step of the tuner.

    Attributes:
        changes: stage -> (size before, size after).
        why: in words.
        before, predicted, after: chunks per second, measured before, expected, and measured after; None while on trial.
        outcome: what became of it.
    """

    changes: Mapping[str, tuple[Size, Size]]
    why: str
    before: float
    predicted: float
    after: float | None = None
    outcome: Outcome = "on trial"

    def __str__(self) -> str:
        words = []
        for name, (old, new) in self.changes.items():
            if old.workers != new.workers:
                words.append(f"{name}: {old.workers} -> {counted(new.workers, 'worker')}")
            if old.capacity != new.capacity:
                words.append(f"{name}: room for {old.capacity} -> {new.capacity}")
        after = "..." if self.after is None else f"{self.after:,.1f}"
        rates = f"{self.before:,.1f} items/s, expected {self.predicted:,.1f}, became {after}"
        return f"{'; '.join(words)} ({self.why}): {rates}, {self.outcome}"


@dataclass(frozen=True)
class Tuning:
    """What ``loader.tuning()`` gives: every decision, and the settings to keep.

    Attributes:
        decisions: in order.
        sizes: of every tuned stage, now; without a step that is on trial.
        advice: what the tuner cannot do itself, such as ``backend="process"``.
        settled: whether nothing is left to try for now.
        limit: what allows no more, in words; "" while larger sizes still promise more.
    """

    decisions: tuple[Decision, ...] = ()
    sizes: Sizes = field(default_factory=dict)
    advice: tuple[str, ...] = ()
    settled: bool = False
    limit: str = ""

    @property
    def settings(self) -> dict[str, dict[str, int]]:
        """As ``graph.resize`` takes them."""
        return {
            name: {"workers": size.workers, "capacity": size.capacity} for name, size in self.sizes.items()
        }

    @property
    def code(self) -> str:
        """The settings as code to paste behind the graph: they are fixed then."""
        if not self.sizes:
            return "# nothing was tuned"
        lines = [f"    {name!r}: {values}," for name, values in self.settings.items()]
        return "\n".join(["graph.resize({", *lines, "})"])

    @property
    def story(self) -> str:
        """Every decision, and the advice, as lines."""
        kept = sum(decision.outcome == "kept" for decision in self.decisions)
        state = "settled" if self.settled else "still tuning"
        lines = [f"{counted(len(self.decisions), 'decision')}, {kept} kept, {state}"]
        lines += [f"  {number}. {decision}" for number, decision in enumerate(self.decisions, 1)]
        if self.limit:
            lines.append(f"  stopped by: {self.limit}")
        lines += [f"  advice: {each}" for each in self.advice]
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.story}\n\n{self.code}"
