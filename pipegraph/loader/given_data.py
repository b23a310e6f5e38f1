"""What users gave to sources and their loops may change: what of it may be read ahead, and where changes go unseen."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Any

from pipegraph.capabilities import UserData, functions_of
from pipegraph.contracts import Source
from pipegraph.errors import GraphError, PipegraphWarning, note
from pipegraph.fingerprints import fingerprint, length_of
from pipegraph.planning.plan import Plan

IN_PLACE = (
    "stage {!r}: a stage behind it has changed its data in place, and other epochs, or rows read again, get what was "
    "made of them. Let the function change a copy (x.clone(), x.copy(), x + 1 in place of x.add_(1)), or read the "
    "data in processes, which have copies: backend='process'"
)
UNSEEN = (
    "stage {!r}: {} has changed since its workers were started, which have a copy of it and do not see the change. "
    "{} reads what the training loop holds; or make another loader once the data is complete"
)


Lengths = tuple[int | None, int | None]
"""Of the data, and of the sampler; None where there is none or it is not known."""

NONE: Lengths = (None, None)


class GivenData:
    """Looks, where a pass begins and ends, at what the sources of a loader were given.

    Args:
        isolated: whether all sources are read in another process.
    """

    def __init__(self, plan: Plan, isolated: bool) -> None:
        self._sources: list[tuple[str, Source, UserData, bool]] = [
            (stage.name, stage.source, described, isolated or not stage.backend.in_trainer)
            for stage in plan.running
            if stage.source is not None and (described := stage.source.can(UserData)) is not None
        ]
        self._functions: list[tuple[str, Sequence[Any], bool]] = [
            (stage.name, functions_of(stage.operator), isolated or not stage.backend.in_trainer)
            for stage in plan.running
            if stage.source is None
        ]
        self._isolated = isolated
        self._seen: dict[str, tuple[Lengths, tuple[int, int]]] = {}
        self._reported: set[str] = set()

    def begins(self) -> tuple[bool, bool]:
        """A pass begins: whether data, or what functions read, has changed since the one before began: in what was done
        ahead of its pass, and at all.

        Raises:
            GraphError: it has another length than the copy that processes read.
        """
        ahead = any_source = False
        for name, source, described, remote in self._sources:
            data, order = described.given()
            # A sampler is asked in this process, unless all stages are remote.
            order = order if self._isolated or not remote else None
            found = (length_of(data), length_of(order)), fingerprint(data, order)
            before = self._seen.get(name, found)
            if not remote:
                any_source |= found != before
                ahead |= source.reads_ahead and found != before
                if described.handed_out is not None:
                    described.handed_out.forget()
            elif found != before:
                self._unseen(name, before[0], found[0])
                continue
            self._seen[name] = found
        for name, functions, remote in self._functions:
            found = NONE, fingerprint(*functions)
            if found == self._seen.setdefault(name, found):
                continue
            if remote:
                self._unseen(name, NONE, NONE, "what its function reads")
            else:
                ahead = any_source = True
                self._seen[name] = found
        return ahead, any_source

    def _unseen(self, name: str, before: Lengths, now: Lengths, what: str = "its data") -> None:
        message = self._message(name, before, now, what)
        if before != now:
            raise GraphError(message)
        if name not in self._reported:
            self._reported.add(name)
            warnings.warn(message, PipegraphWarning, stacklevel=5)

    def _message(self, name: str, before: Lengths, now: Lengths, what: str = "its data") -> str:
        if self._isolated and what == "its data":
            what = "its data, or its sampler,"
        for of, was, is_ in zip(("data", "sampler"), before, now, strict=True):
            if was != is_:
                what = f"the length of its {of} ({was}, now {is_})"
        remedy = "A loader without isolate=True" if self._isolated else "backend='thread'"
        return UNSEEN.format(name, what, remedy)

    def explain(self, error: BaseException) -> None:
        """Add to a failure what of its source's data has changed unseen."""
        for name, _, described, remote in self._sources:
            before = self._seen[name][0]
            now = length_of(described.given()[0]), before[1]
            if remote and before != now:
                note(error, self._message(name, before, now))

    def ends(self, changed: Collection[str]) -> None:
        """A pass was delivered: warns, once per source, of data that stages have changed in place.

        Args:
            changed: the sources of another process of which that is known.
        """
        for name, _, described, remote in self._sources:
            if name in self._reported:
                continue
            if name in changed or (not remote and described.changed_in_place()):
                self._reported.add(name)
                warnings.warn(IN_PLACE.format(name), PipegraphWarning, stacklevel=5)
