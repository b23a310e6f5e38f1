"""The worker of several fused stages in one process: each stage's results go straight to the next.

A bundle passes through the stages as a whole: all rows through the first, then all through the second. A row that
fails becomes a :class:`FailedRow` in its place, which later stages skip. The page records which stage is at work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from pipegraph.bundle import Bundle, named
from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator, Source
from pipegraph.engine.process.worker import Made, Page, ProcessWorker
from pipegraph.global_generators import Draws

Figures = list[tuple[int, int, int]]
"""For each stage that has begun: nanoseconds of work, rows in, rows out."""


@dataclass(eq=False, slots=True)
class FailedRow:
    """Takes the place of a failed row: the number of the stage in which it failed, and the error."""

    member: int
    error: Any


class RunWorker(ProcessWorker):
    """See the module docstring; the first stage is the base class's own.

    Args:
        others: operators and contexts of the later stages.
        judged: the number of the stage whose policy continues after a failure; -1: a failure ends the rows.
    """

    def __init__(
        self,
        page: Page,
        operator: Any,
        context: Context,
        carry: Any,
        pack: Any,
        others: Sequence[tuple[Operator, Context]],
        judged: int,
    ) -> None:
        super().__init__(page, operator, context, carry, pack)
        self._run_page = page
        self._members = [operator, *(other for other, _ in others)]
        self._contexts = [context, *(of for _, of in others)]
        self._judged = judged
        for other, of in others:
            other.open(of)

    def run(
        self, bundle: Bundle, first: int, until: int | None = None
    ) -> tuple[Any, list[Any] | None, Figures]:
        """Pass rows of a bundle (for a source: indices) through the stages.

        Args:
            until: number of the last stage to run; None for all.

        Returns:
            The results of the rows, up to the first failure in a stage whose policy is to raise; the rows' keys as
            fixed by the stages, None if none was; and what to count.
        """
        figures: Figures = []
        given = bundle.names
        for member, operator in enumerate(self._members[:until]):
            if member:  # fix the keys first: the next function may drop the field
                bundle.names = named(bundle.data, bundle.names)
            self._run_page.enter(member, first)
            start = perf_counter_ns()
            rows = self._through(member, operator, bundle, first)
            begun = len(rows) - sum(row.__class__ is FailedRow and row.member < member for row in rows)
            made = begun - sum(row.__class__ is FailedRow and row.member == member for row in rows)
            figures.append((perf_counter_ns() - start, begun, made))
            names = bundle.names
            if len(rows) < len(bundle.lineages):
                bundle = bundle.part(0, len(rows))
            bundle = bundle.replace(rows)
        if until is not None:
            names, rows = named(bundle.data, names), []
        names = None if names is given else names
        whole = not any(row.__class__ is FailedRow for row in rows)
        return self._packed(rows) if whole else rows, names, figures

    def _through(self, member: int, operator: Any, bundle: Bundle, first: int) -> list[Any]:
        made, rows = Made(self._run_page, first), bundle.data
        reads = isinstance(operator, Source)
        failed = [index for index, row in enumerate(rows) if row.__class__ is FailedRow] if member else []
        while len(made) < len(rows):
            at = len(made)
            if failed and failed[0] == at:
                made.append(rows[failed.pop(0)])
                continue
            part = bundle.part(0, failed[0]) if failed else bundle
            try:
                if reads:
                    operator.read_into(made, part.data, at)
                else:
                    operator.work_into(made, part, at)
            except Exception as error:
                made.append(FailedRow(member, self._carry(error)))
                if member != self._judged:
                    break
        return list(made)

    def whole(self, chunk: Chunk) -> tuple[Chunk | FailedRow, Figures]:
        figures: Figures = []
        for member, (operator, context) in enumerate(zip(self._members, self._contexts, strict=True)):
            self._run_page.enter(member, 0)
            start = perf_counter_ns()
            Draws(context.seed, context.stage).one(chunk.epoch, chunk.lineages[0])
            failed = None
            try:
                chunk = operator.process(chunk)
            except Exception as error:
                failed = FailedRow(member, self._carry(error))
            figures.append((perf_counter_ns() - start, 1, failed is None))
            if failed is not None:
                return failed, figures
        return chunk, figures

    def close(self) -> None:
        """Close all operators; the first error is raised."""
        error: BaseException | None = None
        for operator in reversed(self._members[1:]):
            try:
                operator.close()
            except BaseException as last:
                error = last if error is None else error
        super().close()
        if error is not None:
            raise error
