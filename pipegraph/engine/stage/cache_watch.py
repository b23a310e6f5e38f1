"""Watches what a cache's values are made of: once the training loop has changed it, they are dropped.

Compared where passes begin, by fingerprints. A dataset or function that changes itself when it is used (it counts its
calls, say) looks like one that the loop changes; its first uses show it, and what changes so, the object or what it
reads of its class and module, is not watched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from pipegraph import concurrency
from pipegraph.capabilities import Memo, UserData, UserFunctions, functions_of
from pipegraph.errors import PipegraphWarning
from pipegraph.fingerprints import fingerprint
from pipegraph.planning.plan import StagePlan

PROBES = 2
"""The first uses of a stage, before and after which it is looked at. What changes in all of them is not watched."""


class WatchedStage:
    """What one stage above a cache reads.

    Attributes:
        what: it, in words.
    """

    def __init__(self, what: str, values: Callable[[], Sequence[Any]]) -> None:
        self.what = what
        self._values = values
        self._seen = self._found = fingerprint(*values())
        self._probing = concurrency.Lock()
        self._probes = 0
        self._own_changes = [0, 0]

    def use(self, call: Callable[..., Any], *args: Any) -> Any:
        """What ``call`` gives, which uses it."""
        if self._probes >= PROBES or not self._probing.acquire(blocking=False):
            return call(*args)
        try:
            before = fingerprint(*self._values())
            made = call(*args)
            after = fingerprint(*self._values())
            self._probes += 1
            seen = list(self._seen)
            for part in (0, 1):
                if after[part] != before[part]:
                    self._own_changes[part] += 1
                    if seen[part] == before[part]:
                        seen[part] = after[part]
            self._seen = seen[0], seen[1]
            return made
        finally:
            self._probing.release()

    def changed(self) -> bool:
        """Whether it is other than :meth:`settle` has found it, and not by its own doing."""
        if min(self._own_changes) >= PROBES:
            return False
        self._found = fingerprint(*self._values())
        parts = zip(self._found, self._seen, self._own_changes, strict=True)
        return any(found != seen and own < PROBES for found, seen, own in parts)

    def settle(self) -> None:
        """What :meth:`changed` has found is what values are made of from now on."""
        self._seen = self._found


def watched(stage: StagePlan) -> WatchedStage | None:
    """What the training loop can change of a stage; None where that is nothing, or where workers have copies of it."""
    if not stage.backend.in_trainer:
        return None
    operator: Any = stage.operator
    described = operator.can(UserData)
    if described is not None:
        return WatchedStage(f"the data of stage {stage.name!r}", lambda: described.given()[:1])
    if operator.can(UserFunctions) is not None:
        return WatchedStage(
            f"what the function of stage {stage.name!r} reads", lambda: functions_of(operator)
        )
    if type(operator).__module__.partition(".")[0] == "pipegraph":
        return None
    return WatchedStage(f"stage {stage.name!r}", lambda: (operator,))


IN_PLACE = (
    "a stage behind it has changed in place what the cache keeps. Let the function change a copy (x.clone(), x.copy(), "
    "x + 1 in place of x.add_(1)). Until then"
)


class CacheWatch:
    """All that the values of one cache depend on.

    Args:
        cache: the stage's name.
        memo: the operator of a worker; drops the values of all.
    """

    def __init__(self, cache: str, memo: Memo, above: Sequence[WatchedStage]) -> None:
        self._cache, self._memo, self._above = cache, memo, above
        self._warned: set[str] = set()

    def stale(self) -> bool:
        """Whether something has changed since the values were made. Costs what the fingerprints cost."""
        return self._memo.changed_in_place() or any(each.changed() for each in self._above)

    def refresh(self) -> None:
        """Drop the values if they are stale. Called between runs."""
        changed, in_place = [each for each in self._above if each.changed()], self._memo.changed_in_place()
        if not (changed or in_place):
            return
        means = self._memo.forget()
        for each in changed:
            each.settle()
        if in_place:
            self._warn("in place", f"{IN_PLACE} {means} in every pass that finds it so")
        if changed:
            what = " and ".join(each.what for each in changed)
            self._warn(
                "above", f"{what} has changed since the cache was filled, so {means}. This is said once"
            )

    def _warn(self, why: str, what: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            warnings.warn(f"stage {self._cache!r}: {what}", PipegraphWarning, stacklevel=7)
