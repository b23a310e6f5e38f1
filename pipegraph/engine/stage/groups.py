"""Checks that a restart can reproduce the groups of a user's regrouping operator."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from pipegraph.chunk import Chunk, Cursor, Lineage
from pipegraph.engine.stage.cursors import earlier
from pipegraph.errors import GraphError
from pipegraph.planning.plan import StagePlan

_LINES = (
    "Keep what it holds in a state, chunks as they are (begin() then makes it empty):\n"
    '    def state_dict(self): return {"held": self.held}\n'
    '    def load_state_dict(self, state): self.held = state["held"]'
)


class GroupCheck:
    """The check for an operator without a state. It restarts empty after its last group, so groups must consist of
    consecutive whole chunks, in order, each chunk in exactly one group.

    Below a completion-order stage, where a restart leaves out delivered samples one by one, it only checks that no
    sample is in two consecutive groups.
    """

    def __init__(self, plan: StagePlan) -> None:
        self._name = plan.name
        self._unordered = plan.unordered_above
        self._came: deque[tuple[Cursor, Sequence[Lineage]]] = deque()  # chunks that are in no group yet
        self._end: Cursor = None
        self._last: frozenset[Lineage] = frozenset()

    def begin(self) -> None:
        """Begin an epoch."""
        self._came.clear()
        self._end, self._last = None, frozenset()

    def came(self, chunk: Chunk) -> None:
        """Record a chunk that the operator is given."""
        if not self._unordered:
            self._came.append((chunk.before, chunk.lineages))

    def failed(self, rows: Iterable[Lineage]) -> None:
        """Remove samples with which the operator failed: they will be in no group."""
        gone = set(rows)
        self._came = deque(entry for entry in self._came if not gone.issuperset(entry[1]))

    def check(self, out: Chunk) -> GraphError | None:
        """The error of a group; None if it is valid."""
        rows = frozenset(out.lineages)
        if self._unordered:
            shared, self._last = rows & self._last, rows
            return sent_twice(self._name, next(iter(shared))) if shared else None
        if not earlier(out.before, out.after):
            return self._error(
                "a group was not made by pg.Chunk.group(chunks, data) of the chunks that came in"
            )
        if earlier(out.before, self._end):
            return self._error(
                f"the group of {named(out.lineages[0])} begins before the end of the one before it"
            )
        self._end = out.after
        while self._came and earlier(self._came[0][0], out.after):
            for row in self._came.popleft()[1]:
                if row not in rows:
                    return self._error(
                        f"the group of {named(out.lineages[0])} leaves out {named(row)}, which came between it and "
                        "the one before, or inside it"
                    )
        return None

    def _error(self, what: str) -> GraphError:
        return GraphError(
            f"stage {self._name!r}: {what}. Without a state a regrouping operator may only make groups of "
            f"consecutive whole chunks, else a resume would lose or double samples. {_LINES}"
        )


def sent_twice(stage: str, row: Lineage) -> GraphError:
    """The error for a sample in two groups below a completion-order stage, which delivers whole samples."""
    return GraphError(
        f"stage {stage!r}: {named(row)} leaves twice, below a stage with ordered=False, where a resume knows only "
        "whole samples; make that stage ordered=True"
    )


def missing_from_state(stage: str, row: Lineage) -> GraphError:
    """The error for a stateful operator whose state lacks a sample that it held."""
    return GraphError(
        f"stage {stage!r}: {named(row)} was held while a snapshot was taken, and its state did not hold it: a "
        f"resume would lose it. {_LINES}"
    )


def named(row: Any) -> str:
    """A sample's description for messages."""
    return f"the sample of {row[0]!r} at position {', '.join(map(str, row[1:]))}"
