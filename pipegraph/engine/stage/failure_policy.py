"""Applies a stage's error policy. The policies themselves are values in ``pipegraph.policies``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from pipegraph import concurrency
from pipegraph.chunk import Chunk, EndOfEpoch, Failure
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.stage.budgets import exceeded, is_share
from pipegraph.engine.stage.failure_notes import explain, log_first
from pipegraph.engine.stage.stage_context import StageContext
from pipegraph.engine.stage_worker import Worker
from pipegraph.errors import BudgetError, ShardError, StageTimeoutError, WorkerDiedError, described, note
from pipegraph.global_generators import Draws, drawing
from pipegraph.tree import copy_containers


def ends_run(stage: StageContext, error: BaseException) -> bool:
    """Whether it is no error of the stage: the run is over, or a Ctrl-C came while an inline stage ran in the main
    thread."""
    return isinstance(error, Cancelled) or (
        isinstance(error, KeyboardInterrupt)
        and stage.plan.backend.in_consumer
        and concurrency.current_thread() is concurrency.main_thread()
    )


class Failures:
    """The failure handler of one stage in one run.

    Ordered stages check budgets in item order: a worker with a failed item waits until all earlier
    items have left, so that timing never decides which failure exceeds a budget.
    """

    def __init__(self, stage: StageContext) -> None:
        self.stage, spec = stage, stage.plan.spec
        self.given, self.again, self.skip = spec.on_error, spec.retry, spec.skip
        self.name = stage.plan.name
        self.judges_epochs = self.skip is not None and is_share(self.skip.budget)

    def guard(self, worker: Worker, process: Callable[[Chunk], Any]) -> Callable[[Chunk], Any]:
        """Wrap ``process`` with retries, if the policy has any."""
        if not self.again.times:
            return process

        def retrying(chunk: Chunk) -> Any:
            original = chunk.data  # a function that failed may have changed its containers
            return self.retry(worker, lambda: process(chunk.replace(copy_containers(original))))

        return retrying

    def seeded(self, call: Callable[[Chunk], Any]) -> Callable[[Chunk], Any]:
        """Wrap ``call`` to draw from the chunk's generator, unless the operator does so itself."""
        if self.stage.plan.traits.seeds_itself:
            return call
        return drawing(call, Draws(self.stage.run.seed, self.stage.name))

    def flushing(self, flush: Callable[[], Any], epoch: int) -> Callable[[], Any]:
        """Wrap ``flush`` to draw from a generator of its own."""

        def with_numbers() -> Any:
            draws = Draws(self.stage.run.seed, self.stage.name)
            draws.one(epoch, ("end",))
            return flush()

        return with_numbers

    def guard_children(self, worker: Worker, process: Callable[[Chunk], Any]) -> Callable[[Chunk], Any]:
        """As :meth:`guard`, for an expanding operator: a retry continues after the children already sent."""
        process, retries = self.seeded(process), self.again.times
        if not retries:
            return process

        def retrying(chunk: Chunk) -> Iterator[Any]:
            original, done = chunk.data, 0
            for turn in range(retries + 1):
                try:
                    made = process(chunk.replace(copy_containers(original)))
                    for child in islice(made, done, None):
                        done += 1
                        yield child
                    return
                except Exception:
                    if turn == retries:
                        raise
                    self._before_retry(worker, turn)

        return retrying

    def _before_retry(self, worker: Worker, turn: int) -> None:
        worker.meter.retried += 1
        backoff = self.again.backoff
        if backoff and self.stage.run.stopping.wait(backoff * 2**turn):
            raise Cancelled from None

    def retry(self, worker: Worker, attempt: Callable[[], Any]) -> Any:
        """Call ``attempt`` up to ``times`` more times; the last error is raised."""
        try:
            return attempt()
        except Exception as error:
            first = error
        try:
            return self.try_again(worker, attempt, first)
        finally:
            del first

    def try_again(self, worker: Worker, attempt: Callable[[], Any], error: BaseException) -> Any:
        """As :meth:`retry`, after a first try that failed with ``error``."""
        for turn in range(self.again.times if isinstance(error, Exception) else 0):
            self._before_retry(worker, turn)
            try:
                return attempt()
            except Exception as again:
                error = again
        try:
            raise error
        finally:
            del error

    def handle(
        self, worker: Worker, chunk: Chunk, error: BaseException, row: int = 0, made: int = 0
    ) -> Failure | None:
        """Apply the policy to a failed chunk; returns None (skipped), or the failure.

        ``row`` is its index in its bundle, ``made`` the number of its items that were made before the failure.

        Called inside ``except BaseException``. Exceptions that end the run are raised again; so is Ctrl-C, which
        an inline stage may get in its consumer's thread.
        """
        if ends_run(self.stage, error):
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame, and so to the worker's
        worker.meter.failed += 1
        if not isinstance(error, Exception) or self._loses_state(error) or self._cannot_count(error):
            return self.give_up(chunk, error)
        return self._judge(worker, chunk, error, row, made)

    def made_instead(
        self, worker: Worker, chunk: Chunk | None, error: BaseException, epoch: int
    ) -> list[Any]:
        """As :meth:`handle`, for calls that return several chunks; ``chunk`` is None for one at the end of an epoch.

        Called inside ``except BaseException``.
        """
        failure: Failure | None
        if chunk is not None:
            failure = self.handle(worker, chunk, error)
        elif ends_run(self.stage, error):
            try:
                raise error
            finally:
                del error  # as in handle
        else:
            note(error, f"pipegraph: stage {self.stage.name!r}, at the end of epoch {epoch}")
            failure = Failure(error, epoch)
        return [] if failure is None else [failure]

    def _loses_state(self, error: Exception) -> bool:
        """Whether the operator's state was lost with its process, so that no policy can continue."""
        return isinstance(error, WorkerDiedError | StageTimeoutError) and self.stage.plan.kind.keeps

    def _cannot_count(self, error: Exception) -> bool:
        """Whether a budget would take an unknown number of lost samples for one."""
        if (
            self.skip is None
            or self.skip.budget is None
            or not (isinstance(error, ShardError) and error.uncounted)
        ):
            return False
        note(
            error,
            f"pipegraph: nobody knows how many samples are lost, so that the budget of {self.skip.budget} in "
            f"on_error={self.given!r} cannot count them: copy the shard again, give ShardSelect the manifest of the "
            "whole shards, or use pg.Skip() without a budget",
        )
        return True

    def give_up(self, chunk: Chunk, error: BaseException) -> Failure:
        """The failure for a chunk that no policy leaves out."""
        error = explain(error, self.name, chunk)
        if not self.stage.in_order:
            self.stage.run.fail(error)
            raise Cancelled
        return Failure(error, chunk.epoch)

    def _judge(
        self, worker: Worker, chunk: Chunk, error: Exception, row: int, made: int = 0
    ) -> Failure | None:
        """Record the failure and leave the chunk out, unless that exceeds the budget."""
        stage, name, skip = self.stage, self.name, self.skip
        if skip is None:
            return self.give_up(chunk, error)
        paused = worker.meter.pause()
        stage.wait_turn(worker.ticket)
        worker.meter.resume(paused)
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
            log_first(stage.plan.spec, lost, made)
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

    # -- rows of a batch -----------------------------------------------------------------------

    def do_row(
        self, worker: Worker, work: Callable[[], None], first: BaseException | None = None
    ) -> BaseException | None:
        """Do one row, with retries if the policy has any; returns its error, if it failed.

        Args:
            first: the error of a first try, if there was one.
        """
        try:
            if first is None:
                self.retry(worker, work)
            else:
                self.try_again(worker, work, first)
        except BaseException as error:
            if ends_run(self.stage, error):
                raise
            return error
        return None

    def judge_rows(
        self, worker: Worker, chunk: Chunk, failed: dict[int, BaseException]
    ) -> list[int] | Failure:
        """Skip the failed rows; returns the rows that are left, or the first failure that ends the epoch."""
        for index, error in sorted(failed.items()):
            worker.meter.failed += 1
            one = chunk.row(index, None)
            if not isinstance(error, Exception):
                return self.give_up(one, error)
            failure = self._judge(worker, one, error, index)
            if failure is not None:
                return failure
        return [index for index in range(len(chunk.row_lineages)) if index not in failed]
