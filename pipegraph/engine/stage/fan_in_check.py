"""Checks of a user's fan-in: what it reads, how it begins an epoch, and that a restart reproduces its outputs."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from operator import index as as_int
from typing import Any

from pipegraph.chunk import Chunk, Cursor, Lineage
from pipegraph.contracts import FanIn
from pipegraph.engine.stage.cursors import detached, earlier, freeze
from pipegraph.engine.stage.groups import named
from pipegraph.errors import GraphError, shown
from pipegraph.planning.plan import StagePlan

EPOCHS_AROUND = 8
"""A user's fan-in may read nothing in an epoch if it would read something in one of the 8 before or after it."""


def checked_input(stage: str, operator: FanIn, inputs: int, ended: Collection[int]) -> int | None:
    """What a user's ``next_input()`` returns."""
    index = operator.next_input()
    if index is None:
        return None
    if not hasattr(type(index), "__index__") or not 0 <= index < inputs:
        raise GraphError(
            f"stage {stage!r}: next_input() returned {shown(index)}, and its inputs are 0 to {inputs - 1}: return the "
            "number of one, or None at the end of the epoch"
        )
    if index in ended:
        raise GraphError(
            f"stage {stage!r}: next_input() returned input {index}, which has ended in this epoch: note it in "
            "end_input(index), and return another one, or None once all have ended"
        )
    return as_int(index)


def check_begun(
    stage: str, unused: FanIn, operator: FanIn, inputs: int, epoch: int, first: int | None
) -> GraphError | None:
    """The error of a user's fan-in that begins an epoch otherwise than a copy of it that has run none; None if neither.

    Args:
        first: the input that it reads first.
    """
    begins = (
        f"stage {stage!r}: begin() must make the fan-in as it was before its first epoch, else an epoch depends on "
        "those before it, which a resumed run has not had"
    )
    remedy = "Set in begin() what end_input() and process() change"
    if first is None:
        around = range(max(0, epoch - EPOCHS_AROUND), epoch + EPOCHS_AROUND + 1)
        chosen = not _reads(unused, inputs, epoch) and any(_reads(unused, inputs, each) for each in around)
        if chosen or operator.merged_length([1] * inputs) == 0:
            return None
        return GraphError(
            f"{begins}: next_input() returned None at the beginning of epoch {epoch}, where no input has ended yet. "
            f"{remedy}; one that never gives anything says so with a merged_length() of 0"
        )
    nowhere: list[Any] = [None] * inputs
    unused.begin(inputs, epoch)
    expected, new = freeze(unused.cursor(nowhere)), unused.next_input()
    found = freeze(operator.cursor(nowhere))
    if (found, first) == (expected, new):
        return None
    return GraphError(
        f"{begins}: at the beginning of epoch {epoch} its cursor is {shown(found)} and it reads input {first}, where a "
        f"new one has {shown(expected)} and reads input {new}. {remedy}"
    )


def _reads(unused: FanIn, inputs: int, epoch: int) -> bool:
    """Whether a copy that has run no epoch reads any input in this one."""
    unused.begin(inputs, epoch)
    return unused.next_input() is not None


class FanInCheck:
    """The check for a fan-in: at each output a copy of it resumes there, and must read the same input next."""

    def __init__(self, plan: StagePlan, operator: FanIn, epoch: int) -> None:
        self._name = plan.name
        self._unordered = plan.unordered_above
        self._epoch = epoch
        self._copy = detached(operator)
        self._came: set[Lineage] = set()
        self._last: list[Cursor] | None = None  # the positions at the last output

    def came(self, chunk: Chunk) -> None:
        """Record a chunk that the fan-in is given."""
        self._came.update(chunk.lineages)

    def check(
        self,
        operator: FanIn,
        out: Chunk,
        positions: Sequence[Cursor],
        ended: Collection[int],
        after: int | None,
    ) -> GraphError | None:
        """The error of an output, which has its cursors; None if it is valid.

        Args:
            after: the input that is read next.
        """
        came, self._came = self._came, set()
        old = next((row for row in out.lineages if row not in came), None)
        if old is not None:
            return self._error(
                f"{named(old)} came before an earlier output, or did not come; a resume after that output would lose "
                "it. Make an output of what came since the one before"
            )
        marks = [None if position is None else number for number, position in enumerate(positions, 1)]
        try:
            # Below completion order positions are low-water marks, and samples say what was delivered.
            grows = self._unordered or earlier(out.before, out.after)
            cursor = freeze(json.loads(json.dumps(operator.cursor(marks))))
            if not isinstance(cursor, tuple):
                raise TypeError(f"it returned {shown(cursor)}")
        except (TypeError, ValueError) as error:
            return self._error(
                f"cursor() must return a tuple of positions and other JSON values that can be compared ({error})"
            )
        if not grows:
            return self._error(
                f"its cursors must grow from output to output, but {shown(out.before)} was followed by "
                f"{shown(out.after)}: put the positions or a count of outputs first"
            )
        self._last = list(positions)
        return self._resumed(operator, cursor, marks, ended, after)

    def ends(
        self, operator: FanIn, positions: Sequence[Cursor], ended: Collection[int], after: int | None
    ) -> GraphError | None:
        """As :meth:`check`, when an input has ended and nothing came since the last output."""
        if self._came or self._last != list(positions):
            return None
        marks = [None if position is None else number for number, position in enumerate(positions, 1)]
        cursor = freeze(json.loads(json.dumps(operator.cursor(marks))))
        wrong = self._resumed(operator, cursor, marks, ended, after)
        if wrong is not None:
            wrong.add_note(
                "pipegraph: an input has ended; a fan-in that holds items for later outputs cannot resume"
            )
        return wrong

    def _resumed(
        self, operator: FanIn, cursor: Any, marks: list[Any], ended: Collection[int], after: int | None
    ) -> GraphError | None:
        resumed = self._copy
        resumed.begin(len(marks), self._epoch)
        found = list(resumed.cursors(cursor, len(marks)))
        if found != marks:
            return self._error(
                f"cursors() returned {shown(found)}, not the positions that cursor() was given, {marks}"
            )
        if (again := freeze(resumed.cursor(found))) != cursor:
            return self._error(
                f"cursors() does not restore what cursor() holds: {cursor} became {shown(again)}"
            )
        following = resumed.next_input()
        for _ in ended:
            if (
                following is not None and following in ended
            ):  # it is at its end, where the resumed run finds it too
                resumed.end_input(following)
                following = resumed.next_input()
        if following != after:
            return self._error(
                f"resumed at the cursor {cursor}, it would next read input {following}, not {after}: return from "
                "cursor() also what next_input() depends on, and restore it in cursors()"
            )
        return None

    def _error(self, what: str) -> GraphError:
        return GraphError(
            f"stage {self._name!r}: {what}. A fan-in resumes from its cursors alone, so that no sample is lost or "
            "doubled:\n"
            "    def cursor(self, positions): return (*positions, self.at)\n"
            "    def cursors(self, cursor, inputs): *positions, self.at = cursor; return positions"
        )
