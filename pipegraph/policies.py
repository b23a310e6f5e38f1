"""Error policies of a stage: ``on_error="raise"``, ``Skip``, ``Retry``, ``Replace``.

Frozen values that say *what*; ``engine/stage/failure_policy.py`` does it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipegraph.errors import GraphError
from pipegraph.integers import amount, integer

SHARE_COUNTS_AFTER = 100
"""A budget given as a share is not judged before this many items, but at the epoch's end: 1 bad of the first 3 is no
rate, 1 bad of all 3 is."""


def budget_of(budget: int | float | None, owner: str) -> int | float | None:
    """The budget given; raises GraphError unless it is None, a count >= 0 (int) or a share of 0 to 1 (float)."""
    if budget is None or (isinstance(budget, float) and 0 <= budget <= 1):
        return budget
    rule = "must be a count (an int >= {}), a share (a float of 0 to 1) or None"
    return integer(budget, f"{owner}: budget", 0, rule)


def is_share(budget: int | float | None) -> bool:
    """Whether a budget is a share of the items, and not a number of them."""
    return isinstance(budget, float) and budget > 0


def exceeded(budget: int | float | None, failed: int, items: int) -> bool:
    """Whether ``failed`` of ``items`` (this failure included) is more than the budget allows."""
    if budget is None:
        return False
    if is_share(budget):
        return items >= SHARE_COUNTS_AFTER and failed / items > budget
    return failed > budget


@dataclass(frozen=True)
class Skip:
    """Leave failing items out, at most ``budget`` of them per stage, rank and epoch.

    Args:
        budget: a count (int), or a share of the stage's items (a float of at most 1), or None for no bound. A
            share is judged at each failure from the 100th item on, and again at the end of the epoch, however short
            that was; there more failures than it allows end the pass with a :class:`~pipegraph.errors.BudgetError`.

    The first item that a stage leaves out is logged, as a warning of the logger ``pipegraph``.

    Raises:
        GraphError: ``budget`` is negative, or a share above 1.
    """

    budget: int | float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", budget_of(self.budget, "Skip"))


@dataclass(frozen=True)
class Replace:
    """Put another sample of the neighbourhood in a failing one's place, so that counts never move.

    The substitute is a draw keyed by the position: first from the same window of the source's order, then from blocks
    that were not tried yet, so that one broken block stops nothing.

    Args:
        tries: substitutes tried before the original failure is raised.
        budget: as for :class:`Skip`.

    Raises:
        GraphError: ``tries`` is below 1, or ``budget`` is negative or a share above 1.
    """

    tries: int = 3
    budget: int | float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tries", integer(self.tries, "Replace: tries"))
        object.__setattr__(self, "budget", budget_of(self.budget, "Replace"))


@dataclass(frozen=True)
class Retry:
    """Try a failing item again, then do ``then``.

    Args:
        times: tries after the first.
        backoff: seconds before the first retry; doubles with each one. A stage that stops does not wait it out.
        then: ``"raise"``, :class:`Skip` or :class:`Replace`.

    Raises:
        GraphError: ``times`` or ``backoff`` is below 0, or ``then`` is something else.
    """

    times: int = 1
    backoff: float = 0.0
    then: str | Skip | Replace = "raise"

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", integer(self.times, "Retry: times", 0))
        amount(self.backoff, "Retry: backoff (seconds)", refusal=GraphError)
        if self.then != "raise" and not isinstance(self.then, Skip | Replace):
            raise GraphError(
                f'Retry: then must be "raise", pg.Skip(...) or pg.Replace(...), got {self.then!r}'
            )


Policy = str | Skip | Retry | Replace


def check_policy(policy: object, stage: str) -> None:
    """Raises GraphError for anything that is not a policy."""
    if policy == "raise" or isinstance(policy, Skip | Retry | Replace):
        return
    raise GraphError(
        f'stage {stage!r}: on_error must be "raise", pg.Skip(budget), pg.Retry(times, backoff, then=...) '
        f"or pg.Replace(), got {policy!r}"
    )


def final_policy(policy: Policy) -> str | Skip | Replace:
    """What is done once retries are used up."""
    return policy.then if isinstance(policy, Retry) else policy
