"""Applies a stage's error policy. The policies themselves are values in ``pipegraph.stage_spec``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pipegraph import concurrency
from pipegraph.bundle import DROPPED, Bundle
from pipegraph.chunk import Chunk, EndOfEpoch, Failure
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.stage.budgets import exceeded, is_share
from pipegraph.engine.stage.failure_notes import explain, log_first
from pipegraph.engine.stage_worker import Worker
from pipegraph.errors import BudgetError, StageTimeoutError, WorkerDiedError, described, note
from pipegraph.global_generators import Draws, drawing

if TYPE_CHECKING:
    from pipegraph.engine.stage.stage_run import StageRun

T = TypeVar("T")

Outcome = tuple[Any, BaseException | None]
"""What was made of a block's rows from some row on, and the error of the row after these; None if none failed."""


class Block(Protocol):
    """Rows that are done one after the other: of a chunk there is one, a bundle has several."""

    @property
    def count(self) -> float:
        """How many."""

    def one(self, index: int, /) -> Chunk:
        """A row by itself."""


Do = Callable[[Any, int], Outcome]
"""Does the rows of a block from a row on: in this thread, or in a process or an actor."""

Answer = Callable[[BaseException, int], Failure | None]
"""What takes the place of a row, by its number, that failed with an error; None: it is left out."""


def ends_run(stage: StageRun, error: BaseException) -> bool:
    """Whether it is no error of the stage: the run is over, or a Ctrl-C came while an inline stage ran in the main
    thread."""
    return isinstance(error, Cancelled) or (
        isinstance(error, KeyboardInterrupt)
        and stage.plan.backend.in_consumer
        and concurrency.current_thread() is concurrency.main_thread()
    )


def outcome_of(call: Callable[..., object], *args: object) -> Outcome:
    """The outcome of a row that a call does."""
    try:
        return (call(*args),), None
    except BaseException as error:
        return (), error


class Failures:
    """The failure handler of one stage in one run.

    Ordered stages check budgets in item order: a worker with a failed item waits until all earlier
    items have left, so that timing never decides which failure exceeds a budget.
    """

    def __init__(self, stage: StageRun) -> None:
        self.stage, spec = stage, stage.plan.spec
        self.given, self.again, self.skip = spec.on_error, spec.retry, spec.skip
        self.name = stage.plan.name
        self.judges_epochs = self.skip is not None and is_share(self.skip.budget)

    def seeded(self, call: Callable[[Chunk], T]) -> Callable[[Chunk], T]:
        """Wrap ``call`` to draw from the chunk's generator, unless the operator does so itself."""
        if self.stage.plan.traits.seeds_itself:
            return call
        return drawing(call, Draws(self.stage.run.seed, self.stage.name))

    def flushing(self, flush: Callable[[], T], epoch: int) -> Callable[[], T]:
        """Wrap ``flush`` to draw from a generator of its own."""

        def with_numbers() -> T:
            draws = Draws(self.stage.run.seed, self.stage.name)
            draws.one(epoch, ("end",))
            return flush()

        return with_numbers

    # -- a block -------------------------------------------------------------------------------

    def do_all(self, worker: Worker, block: Block, do: Do, row: int = 0) -> Any:
        """Do all rows of a block, timed: for each one its result, ``DROPPED``, or its ``Failure``.

        Args:
            row: the number of the block's first row among those taken with its ticket.
        """
        outcome: Outcome | None = worker.meter.timed(do, block, 0)
        assert outcome is not None
        made = outcome[0]
        worker.whole = outcome[1] is None and len(made) == block.count
        if not worker.whole:
            answer = partial(self._answer, worker, block, row)
            parts, made, outcome = self.with_policy(worker, block, do, answer, outcome), [], None
            for part in parts:
                made += part if isinstance(part, list | tuple) else part.rows()
                part = ()
        worker.meter.calls += block.count
        try:
            return made
        finally:
            del made  # a failure's traceback refers to this frame

    def with_policy(
        self, worker: Worker, block: Block, do: Do, answer: Answer, outcome: Outcome | None = None
    ) -> Iterator[Any]:
        """As :meth:`do_all`: the results as they are made.

        Args:
            answer: what takes the place of a row, by its number, that has failed.
            outcome: the first one, if it is there.
        """
        at = turn = 0
        made: Any
        while outcome is not None or at < block.count:
            made, error = worker.meter.timed(do, block, at) if outcome is None else outcome
            outcome = None
            if made:
                at, turn = at + len(made), 0
                yield made
            if error is None:
                continue
            if at >= block.count:  # no row's, which a policy could leave out
                note(error, f"pipegraph: stage {self.name!r}, after the last sample of a bundle")
                raise error
            if turn < self.again.times and isinstance(error, Exception):
                self._before_retry(worker, turn)
                turn += 1
                continue
            at, turn = at + 1, 0
            try:
                self.pass_on(error)  # here, where no frame keeps it
                failure = answer(error, at - 1)
            finally:
                error = None  # its traceback refers to this frame
            yield (DROPPED if failure is None else failure,)
            failure = None

    def _answer(
        self, worker: Worker, block: Block, row: int, error: BaseException, at: int
    ) -> Failure | None:
        try:
            one = block.one(at)
        except Exception as broken:  # which the stage above has not made: this one was the first to see it
            assert isinstance(block, Bundle)
            return self.stage.above[0].failures.give_up(block.named_one(at, None), broken)
        return self.handle(worker, one, error, row + at)

    def _before_retry(self, worker: Worker, turn: int) -> None:
        worker.meter.retried += 1
        backoff = self.again.backoff
        if backoff and self.stage.run.stopping.wait(backoff * 2**turn):
            raise Cancelled from None

    def handle(self, worker: Worker, chunk: Chunk, error: BaseException, row: int = 0) -> Failure | None:
        """Apply the policy to a failed chunk; returns None (skipped), or the failure.

        ``row`` is its index in its bundle.
        Exceptions that end the run are raised again; so is Ctrl-C, which an inline stage may get in its consumer's
        thread.
        """
        self.pass_on(error)
        worker.meter.failed += 1
        if not isinstance(error, Exception) or self._loses_state(error):
            return self.give_up(chunk, error)
        return self._judge(worker, chunk, error, row)

    def pass_on(self, error: BaseException) -> None:
        """Raise an exception that is no error of the stage."""
        if ends_run(self.stage, error):
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame, and so to the worker's

    def at_flush(self, error: BaseException, epoch: int) -> Failure:
        """The failure for an error at the end of an epoch, which is no sample's."""
        note(error, f"pipegraph: stage {self.name!r}, at the end of epoch {epoch}")
        return Failure(error, epoch)

    def _loses_state(self, error: Exception) -> bool:
        """Whether the operator's state was lost with its process, so that no policy can continue."""
        return isinstance(error, WorkerDiedError | StageTimeoutError) and self.stage.plan.kind.keeps

    def give_up(self, chunk: Chunk, error: BaseException) -> Failure:
        """The failure for a chunk that no policy leaves out."""
        error = explain(error, self.name, chunk)
        if not self.stage.in_order:
            self.stage.run.fail(error)
            raise Cancelled
        return Failure(error, chunk.epoch)

    def _judge(self, worker: Worker, chunk: Chunk, error: Exception, row: int) -> Failure | None:
        """Record the failure and leave the chunk out, unless that exceeds the budget."""
        stage, name, skip = self.stage, self.name, self.skip
        if skip is None:
            return self.give_up(chunk, error)
        stage.sender.wait_turn(worker.ticket)
        ledger = stage.run.ledger
        with stage.judging:
            ordinal = stage.ordinals.of(worker.ticket, row)
            failed, last = ledger.failed(name, chunk.epoch)
            failed += 1
            items = max(ordinal, last)  # in completion order, later items may have failed earlier
            over = exceeded(skip.budget, failed, items)
            if over:
                note(
                    error,
                    f"pipegraph: stage {name!r}: failure {failed} of {items} items exceeds the budget "
                    f"of {skip.budget} in on_error={self.given!r}",
                )
            else:
                lost = ledger.add(name, ordinal, chunk, described(error))
        if over:
            return self.give_up(chunk, error)
        if lost is not None:
            log_first(stage.plan.spec, lost)
        return None

    # -- the end of an epoch -------------------------------------------------------------------

    def at_end(self, epoch: int) -> Failure | None:
        """The failure to send at the end of an epoch if too large a share of its items failed; else None."""
        stage = self.stage
        if not self.judges_epochs or stage.stop_epoch >= epoch:  # the epoch was cut short
            return None
        assert self.skip is not None
        budget = self.skip.budget
        assert budget is not None
        if not stage.numbers_taken:
            stage.ordinals.number(0, EndOfEpoch(epoch))
        items, (failed, _) = stage.ordinals.total(epoch), stage.run.ledger.failed(self.name, epoch)
        if not failed or failed / max(1, items) <= budget:
            return None
        error = BudgetError(
            f"stage {self.name!r}: {failed} of the {items} items of epoch {epoch} failed, which exceeds the budget "
            f"of {budget} in on_error={self.given!r}; loader.profile().quarantined lists them"
        )
        return Failure(error, epoch)
