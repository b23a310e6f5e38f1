"""The contract of error policies: what a stage does with an item that fails.

Planner, engine and profile ask a policy for its facts and know none by its class; ``engine/stage/failure_policy.py``
applies one. ``docs/concepts.md`` (Failures) has an example of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, Literal

from pipegraph.chunk import Chunk
from pipegraph.errors import GraphError, shown


class ErrorPolicy:
    """What a stage does with items that fail: the base class of all policies, and of your own.

    A policy is a value without state, such as a frozen dataclass: all workers of a stage share it, other processes get
    copies, and messages show its ``repr``. The plan relies on its facts; ``instead`` must agree with them. Retries, the
    budget, the ledger, the log and states are left to the engine.

    Attributes:
        ends: whether the first failure ends the pass, without a budget or an entry in the ledger.
        drops: whether items may be missing from the output, so that its length is unknown.
        substitutes: where substitutes for failed samples enter, if there are any. ``"input"``: this stage does its work
            on them, also on single rows of a batch. ``"output"``: they are results, and the stages below receive them.
            Stages with either must be one-to-one, and none may be above a ``Cache``.
        neighbours: how many other samples may be read in place of a failed one.
        retries: tries after the first.
        backoff: seconds before the first retry; doubles with each one.
        budget: failures allowed, see :class:`Skip`.
        became: what happened to a failed item, for the log.
    """

    ends: ClassVar[bool] = False
    drops: ClassVar[bool] = False
    substitutes: ClassVar[Literal["", "input", "output"]] = ""
    became: ClassVar[str] = "failed"

    @property
    def neighbours(self) -> int:
        return 0

    @property
    def retries(self) -> int:
        return 0

    @property
    def backoff(self) -> float:
        return 0.0

    @property
    def budget(self) -> int | float | None:
        return None

    @property
    def last(self) -> ErrorPolicy:
        """The policy for an item whose retries have failed too."""
        return self

    def instead(
        self, failed: Chunk, error: Exception, neighbours: Callable[[int], Iterator[Chunk]]
    ) -> Iterable[Chunk] | Exception | None:
        """What takes the place of an item that has failed within the budget, after its retries.

        Args:
            failed: the item as the stage received it. Of a row of a batch, ``data`` is None.
            neighbours: ``neighbours(n)`` iterates over up to n other samples of the neighbourhood, as they come in.

        Returns:
            None leaves the item out (with ``drops``); an exception ends the pass. Otherwise an iterable of substitutes,
            each ``failed.replace(data)`` (with ``substitutes``): the first on which the stage does not fail is taken,
            and if there is none, ``error`` ends the pass. Their containers are copied, arrays and tensors are not.
        """
        return error


class _Raise(ErrorPolicy):
    """``on_error="raise"``."""

    ends = True


_RAISE = _Raise()


Policy = str | ErrorPolicy


def check_policy(given: Policy, stage: str) -> None:
    """Raises GraphError for anything that is not a policy, or has facts that nobody knows."""
    if given != "raise" and not isinstance(given, ErrorPolicy):
        raise GraphError(
            f'stage {stage!r}: on_error must be "raise", pg.Skip(budget), pg.Retry(times, backoff, then=...) '
            f"or pg.Replace(), got {shown(given)}"
        )
    if (said := policy(given).substitutes) not in ("", "input", "output"):
        raise GraphError(
            f"stage {stage!r}: {type(given).__name__}.substitutes must be 'input', 'output' or '', got {said!r}"
        )


def policy(given: Policy) -> ErrorPolicy:
    """The policy that a user gave."""
    return given if isinstance(given, ErrorPolicy) else _RAISE


def check_instead(policy: ErrorPolicy, given: object) -> None:
    """Raises GraphError unless its facts allow what a policy's ``instead`` has returned."""
    lacks = None
    if given is None:
        lacks = None if policy.drops else "drops = True"
    elif not isinstance(given, Exception):
        lacks = None if policy.substitutes else 'substitutes = "input" or "output"'
        if not isinstance(given, Iterable):
            lacks = "an iterable of chunks, as in [failed.replace(data)], an exception or None as its result"
    if lacks is not None:
        raise GraphError(
            f"on_error={policy!r}: instead() returned a {type(given).__name__}, which needs {lacks}"
        )
