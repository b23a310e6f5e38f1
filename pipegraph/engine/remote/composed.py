"""Several fused stages as one operator, in the process that does their work: results go straight to the next stage.

A bundle passes through the stages as a whole: all rows through the first, then all through the second. Where a stage
has an error policy it is one row after the other, so that no function is called again for rows after a failed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from time import perf_counter_ns
from typing import Any

from pipegraph.bundle import UNNAMED, Bundle, named
from pipegraph.capabilities import BundleSource
from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Fact
from pipegraph.engine.remote.worker import Made, Page
from pipegraph.global_generators import Draws

Report = tuple[list[Any] | None, int, list[list[int]]]
"""Of a call: the rows' keys as fixed by the stages, up to the failed row, None if none was; the number of the stage
that failed; and for each stage nanoseconds of work, rows in, rows out."""


class Composed:
    """See the module docstring.

    Args:
        page: records which stage is at work on which row.
        single: whether rows pass through one after the other.
    """

    kind = "map"
    facts = Fact.SEEDS_ITSELF  # each stage draws its own

    def __init__(
        self, operators: Sequence[Any], contexts: Sequence[Context], page: Page, single: bool
    ) -> None:
        self._members = operators
        self._contexts = contexts
        self._draws = [Draws(context.seed, context.stage) for context in contexts]
        self._page = page
        self._single = single
        self._begin()

    def _begin(self) -> None:
        self._names: list[Any] = []
        self._fixed = False
        self._failed_in = len(self._members) - 1
        self._figures = [[0, 0, 0] for _ in self._members]

    def can(self, capability: type) -> None:
        """None: all of its calls are ``work_into`` and ``process``."""

    def report(self) -> Report:
        """What the proxy is to know of the last call."""
        return self._names if self._fixed else None, self._failed_in, self._figures

    def open(self, context: Context) -> None:
        for operator, own in zip(self._members, self._contexts, strict=True):
            operator.open(own)

    def work_into(self, made: list[Any], bundle: Bundle, start: int) -> None:
        """Append the results for a bundle's rows (for a source: indices), until one fails."""
        self._begin()
        step = 1 if self._single else bundle.count - start
        for first in range(start, bundle.count, step):
            part = bundle if step == bundle.count else bundle.part(first, first + step)
            self._through(made, part, first)

    def process(self, chunk: Chunk) -> Chunk:
        """Do a batch."""
        self._begin()
        for number, operator in enumerate(self._members):
            self._page.enter(number, 0)
            self._draws[number].one(chunk.epoch, chunk.lineages[0])
            start_ns, made = perf_counter_ns(), 0
            try:
                chunk = operator.process(chunk)
                made = 1
            except BaseException:
                self._failed_in = number
                raise
            finally:
                self._figures[number] = [perf_counter_ns() - start_ns, 1, made]
        return chunk

    def names(self, bundle: Bundle, until: int) -> list[Any] | None:
        """The keys of rows as fixed by the stages before number ``until``."""
        self._begin()
        self._through([], bundle, 0, until)
        return self._names if self._fixed else None

    def close(self) -> None:
        """Close all operators; the first error is raised."""
        with ExitStack() as closing:
            for operator in self._members:
                closing.callback(operator.close)

    def _through(self, made: list[Any], bundle: Bundle, first: int, until: int | None = None) -> None:
        """Append the results of a bundle. After a failure the rows before it still go through the later stages."""
        failure: BaseException | None = None
        tail: list[Any] = []  # the key of the failed row
        for number, operator in enumerate(self._members[:until]):
            if number:  # fix the keys first: the next function may drop the field
                self._fix_names(bundle)
            self._page.enter(number, first)
            rows, start_ns = Made(self._page, first), perf_counter_ns()
            begun = bundle.count
            try:
                if (source := operator.can(BundleSource)) is not None:
                    source.read_into(rows, bundle.data, 0)
                else:
                    operator.work_into(rows, bundle, 0)
            except BaseException as error:
                failure, self._failed_in = error, number
                begun = len(rows) + 1
                tail = [UNNAMED if bundle.names is None else bundle.names[len(rows)]]
                if rows:
                    bundle = bundle.part(0, len(rows))
            for index, more in enumerate((perf_counter_ns() - start_ns, begun, len(rows))):
                self._figures[number][index] += more
            if not rows:
                self._names += tail
                assert failure is not None
                raise failure
            bundle = bundle.replace(list(rows))
        if until is not None:
            self._fix_names(bundle)
        self._names += ([UNNAMED] * bundle.count if bundle.names is None else bundle.names) + tail
        made.extend(bundle.data)
        if failure is not None:
            raise failure

    def _fix_names(self, bundle: Bundle) -> None:
        names = named(bundle.data, bundle.names)
        self._fixed |= names is not bundle.names
        bundle.names = names
