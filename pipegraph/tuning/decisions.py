"""What the tuner did and why, as values that print themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipegraph.profile.model import Size, Sizes
from pipegraph.units import counted

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
