"""Checks the groups that a user's regrouping operator makes: whether a restart could make them again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from pipegraph.chunk import Chunk, Cursor, Lineage
from pipegraph.contracts import Operator, Regroup
from pipegraph.engine.stage.cursors import earlier
from pipegraph.errors import GraphError
from pipegraph.planning.plan import StagePlan

_LINES = (
    "Keep what it holds in a state, chunks as they are (begin() then makes it empty):\n"
    '    def state_dict(self): return {"held": self.held}\n'
    '    def load_state_dict(self, state): self.held = state["held"]'
)


class Groups:
    """Of an operator without a state, which restarts empty behind the last group: so groups must be of consecutive
    whole chunks, each in one of them, in the order in which they came.

    Below a completion-order stage, where a restart leaves out every sample that was delivered, a sample must only
    not be in two consecutive groups.
    """

    def __init__(self, plan: StagePlan) -> None:
        self._name = plan.name
        self._unordered = plan.unordered_above
        self._came: deque[tuple[Cursor, Sequence[Lineage]]] = deque()  # what no group has had
        self._end: Cursor = None
        self._last: frozenset[Lineage] = frozenset()

    def begin(self) -> None:
        """A new epoch."""
        self._came.clear()
        self._end, self._last = None, frozenset()

    def came(self, chunk: Chunk) -> None:
        """A chunk is given to the operator."""
        if not self._unordered:
            self._came.append((chunk.before, chunk.lineages))

    def failed(self, rows: Iterable[Lineage]) -> None:
        """The operator failed with these samples: they are in no group."""
        gone = set(rows)
        self._came = deque(entry for entry in self._came if not gone.issuperset(entry[1]))

    def check(self, out: Chunk) -> GraphError | None:
        """What is wrong with a group, if anything is."""
        rows = frozenset(out.lineages)
        if self._unordered:
            shared, self._last = rows & self._last, rows
            return twice(self._name, next(iter(shared))) if shared else None
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


def watched(operator: Operator) -> bool:
    """Whether a regrouping operator leaves its groups' cursors to the engine, so that they must fit."""
    own = type(operator).resume is not Operator.resume
    return isinstance(operator, Regroup) and not operator.consecutive and not own


def twice(stage: str, row: Lineage) -> GraphError:
    """Below a completion-order stage a sample is delivered whole or not at all."""
    return GraphError(
        f"stage {stage!r}: {named(row)} leaves twice, below a stage with ordered=False, where a resume knows only "
        "whole samples; make that stage ordered=True"
    )


def forgotten(stage: str, row: Lineage) -> GraphError:
    """A stateful operator's state lacks a sample that it held."""
    return GraphError(
        f"stage {stage!r}: {named(row)} was held while a snapshot was taken, and its state did not hold it: a "
        f"resume would lose it. {_LINES}"
    )


def named(row: Any) -> str:
    """A sample, in words."""
    return f"the sample of {row[0]!r} at position {', '.join(map(str, row[1:]))}"
