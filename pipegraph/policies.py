"""Error policies besides ``on_error="raise"``: ``Skip`` and ``Retry``. Frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from pipegraph.errors import GraphError, shown
from pipegraph.integers import amount, integer


@dataclass(frozen=True)
class Skip:
    """Leave failing items out, at most ``budget`` of them per stage, rank and epoch, counted from the last start.

    Args:
        budget: a count (int), or a share of the stage's items (a float of at most 1), or None for no limit. A share is
            checked at each failure from the 100th item on, and again at the end of every epoch, however short. If it is
            exceeded at the end, the pass ends with a :class:`~pipegraph.errors.BudgetError`.

    The logger ``pipegraph`` warns at the first item that a stage leaves out.

    Raises:
        GraphError: ``budget`` is negative, or a share above 1.
    """

    budget: int | float | None = None

    def __post_init__(self) -> None:
        if self.budget is None or (isinstance(self.budget, float) and 0 <= self.budget <= 1):
            return
        rule = "must be a count (an int >= {}), a share (a float of 0 to 1) or None"
        object.__setattr__(self, "budget", integer(self.budget, "Skip: budget", 0, rule))


@dataclass(frozen=True)
class Retry:
    """Try a failing item again, then do ``then``.

    Args:
        times: number of tries after the first.
        backoff: seconds before the first retry; doubles with each one. Closing the loader does not wait for it.
        then: ``"raise"`` or :class:`Skip`.

    Raises:
        GraphError: ``times`` or ``backoff`` is below 0, or ``then`` is something else.
    """

    times: int = 1
    backoff: float = 0.0
    then: str | Skip = "raise"

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", integer(self.times, "Retry: times", 0))
        amount(self.backoff, "Retry: backoff (seconds)", refusal=GraphError)
        if self.then != "raise" and not isinstance(self.then, Skip):
            raise GraphError(f'Retry: then must be "raise" or pg.Skip(...), got {shown(self.then)}')


Policy = str | Skip | Retry


def check_policy(given: Policy, stage: str) -> None:
    """Raises GraphError for anything that is not a policy."""
    if given != "raise" and not isinstance(given, Skip | Retry):
        raise GraphError(
            f'stage {stage!r}: on_error must be "raise", pg.Skip(budget) or pg.Retry(times, backoff, then=...), '
            f"got {shown(given)}"
        )


def retry_of(policy: Policy) -> Retry:
    """How often a policy tries again."""
    return policy if isinstance(policy, Retry) else _ONCE


def skip_of(policy: Policy) -> Skip | None:
    """What a policy leaves out; None if a failure ends the pass."""
    last = policy.then if isinstance(policy, Retry) else policy
    return last if isinstance(last, Skip) else None


_ONCE = Retry(0)
