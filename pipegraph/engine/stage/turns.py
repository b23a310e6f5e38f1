"""Checks that a restart can reproduce the outputs of a user's fan-ins and routes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from pipegraph.chunk import Chunk, Cursor, Lineage
from pipegraph.contracts import FanIn, FanOut
from pipegraph.engine.stage.cursors import detached, earlier, freeze
from pipegraph.engine.stage.groups import named
from pipegraph.errors import GraphError, shown
from pipegraph.planning.plan import StagePlan


class MergeCheck:
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
        if operator.inputs_in is not None and list(cursor[slice(*operator.inputs_in)]) != marks:
            return self._error(
                f"it says inputs_in = {operator.inputs_in}, and its cursor for the positions {marks} is {cursor}"
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


class RouteCheck:
    """The check for a route: asked again, as if after a restart, it must choose the same output for a chunk.

    The first time it is asked twice more: from then on both calls for one chunk have an odd and an even number, and one
    that counts its calls gives itself away, however long its runs.

    Args:
        call: wraps a function of a chunk, as the stage wraps ``choose``.
    """

    def __init__(
        self, plan: StagePlan, operator: FanOut, call: Callable[..., Callable[[Chunk], Any]]
    ) -> None:
        self._name = plan.name
        self._copy = copy.copy(operator)
        self._as_it_began = dict(vars(operator))
        self._choose = call(self._copy.choose)
        self._times = 2

    def check(self, chunk: Chunk, output: int) -> GraphError | None:
        """The error of a choice; None if it is valid."""
        times, self._times = self._times, 1
        for _ in range(times):
            attributes = vars(self._copy)
            attributes.clear()
            attributes.update(self._as_it_began)
            try:
                again = self._choose(chunk)
                if again == output:
                    continue
                other = f"{shown(again)} when asked again"
            except Exception as error:
                other = f"raised {type(error).__name__}: {error} when asked again"
            return GraphError(
                f"stage {self._name!r}: choose returned {output} for {named(chunk.lineages[0])}, and {other}. It must "
                "be a pure function of its chunk, which it leaves as it is, else a resume would lose or repeat samples."
                " To take turns return chunk.positions[0] % outputs; what depends on other samples, an operator with a "
                "state above the route writes into the sample"
            )
        return None
