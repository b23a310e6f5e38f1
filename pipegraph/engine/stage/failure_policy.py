"""Applies a stage's error policy. The policies themselves are values in ``pipegraph.policies``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from pipegraph import concurrency
from pipegraph.capabilities import Neighbours
from pipegraph.chunk import Chunk, EndOfEpoch, Failure
from pipegraph.contracts import Fact, Operator, Source
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.stage.failure_notes import explain, log_first
from pipegraph.engine.stage.stage_context import StageContext
from pipegraph.engine.stage_worker import Worker
from pipegraph.error_policy import check_instead
from pipegraph.errors import (
    BudgetError,
    GraphError,
    StageTimeoutError,
    WorkerDiedError,
    described,
    note,
    shown,
)
from pipegraph.global_generators import Draws, drawing
from pipegraph.planning.plan import lineage_above
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
        self.stage = stage
        self.policy = stage.plan.spec.policy
        self.outcome = stage.plan.spec.outcome
        self.name = stage.plan.judged
        self.row_by = "put_row" if self.outcome.substitutes == "output" else "do_row"
        self.judges_epochs = isinstance(self.outcome.budget, float) and self.outcome.budget > 0

    def guard(self, worker: Worker, process: Callable[[Chunk], Any]) -> Callable[[Chunk], Any]:
        """Wrap ``process`` with retries, if the policy has any."""
        if not self.policy.retries:
            return process

        def retrying(chunk: Chunk) -> Any:
            original = chunk.data  # a function that failed may have changed its containers
            return self.retry(worker, lambda: process(chunk.replace(copy_containers(original))))

        return retrying

    def seeded(self, call: Callable[[Chunk], Any]) -> Callable[[Chunk], Any]:
        """Wrap ``call`` to draw from the chunk's generator, unless the operator does so itself."""
        if Fact.SEEDS_ITSELF in self.stage.plan.operator.facts:
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
        process, retries = self.seeded(process), self.policy.retries
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
        backoff = self.policy.backoff
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
        for turn in range(self.policy.retries if isinstance(error, Exception) else 0):
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
    ) -> Chunk | Failure | None:
        """Apply the policy to a failed chunk; returns a substitute, None (skipped), or the failure.

        ``row`` is its index in its bundle, ``made`` the number of its items that were made before the failure.

        Called inside ``except BaseException``. Exceptions that end the run are raised again; so is Ctrl-C, which
        an inline stage may get in its consumer's thread.
        """
        if ends_run(self.stage, error):
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame, and so to the worker's
        meter, name = worker.meter, self.stage.name
        if self.stage.plan.followers:
            member = worker.operator.failed_in
            meter, name = worker.members[member], [name, *(s.name for s in self.stage.plan.followers)][member]
        meter.failed += 1
        if (
            self.outcome.ends
            or not isinstance(error, Exception)
            or self._loses_state(error)
            or name != self.name
        ):
            return self._give_up(chunk, error, name)
        if self.outcome.substitutes and chunk.batched:
            note(
                error,
                f"pipegraph: stage {name!r} failed for a whole batch of {len(chunk.lineages)} samples, not for one of "
                f"its rows, and on_error={self.policy!r} replaces samples only: put the stage above the Batch, or use "
                "pg.Skip(), which leaves the batch out",
            )
            return self._give_up(chunk, error, name)
        out = self._instead(worker, chunk, error, row, self._whole(worker), made)
        return self._give_up(chunk, out) if isinstance(out, Exception) else out

    def made_instead(
        self, worker: Worker, chunk: Chunk | None, error: BaseException, epoch: int
    ) -> list[Any]:
        """As :meth:`handle`, for calls that return several chunks; ``chunk`` is None for one at the end of an epoch.

        Called inside ``except BaseException``.
        """
        failure: Chunk | Failure | None
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

    def _give_up(self, chunk: Chunk, error: BaseException, name: str = "") -> Failure:
        error = explain(error, name or self.name, chunk)
        if not self.stage.in_order:
            self.stage.run.fail(error)
            raise Cancelled
        return Failure(error, chunk.epoch)

    def _judge(self, worker: Worker, chunk: Chunk, error: Exception, row: int, made: int) -> Exception | None:
        """Record the failure, or return the error that exceeds the budget."""
        from pipegraph.engine.stage.budgets import Quarantined, exceeded

        stage, name = self.stage, self.name
        budget = self.outcome.budget
        paused = worker.meter.pause()
        stage.wait_turn(worker.ticket)
        worker.meter.resume(paused)
        ledger = stage.run.ledger
        with stage.judging:
            ordinal = stage.ordinals.of(worker.ticket, chunk, row)
            failed, last = ledger.failed(name, chunk.epoch)
            failed += 1
            items = max(ordinal, last)  # in completion order, later items may have failed earlier
            if exceeded(budget, failed, items):
                note(
                    error,
                    f"pipegraph: stage {name!r}: failure {failed} of {items} items exceeds the budget "
                    f"of {budget} in on_error={self.policy!r}",
                )
                return error
            what = described(error)
            lost = [
                (row, Quarantined(key, row[1], chunk.epoch, name, what))
                for key, row in zip(chunk.keys, chunk.lineages, strict=True)
            ]
            first = ledger.add(name, chunk.epoch, ordinal, lost)
        if first:
            log_first(stage.plan.spec, [each for _, each in lost], made)
        return None

    # -- the end of an epoch -------------------------------------------------------------------

    def at_end(self, epoch: int) -> Failure | None:
        """The failure to send at the end of an epoch if too large a share of its items failed; else None."""
        stage = self.stage
        if not self.judges_epochs or stage.stop_epoch >= epoch:  # the epoch was cut short
            return None
        budget = self.outcome.budget
        assert budget is not None
        if not stage.numbers_taken:
            stage.ordinals.number(0, EndOfEpoch(epoch))
        items, (failed, _) = stage.ordinals.total(epoch), stage.run.ledger.failed(self.name, epoch)
        if not failed or failed / max(1, items) <= budget:
            return None
        error = BudgetError(
            f"stage {self.name!r}: {failed} of the {items} items of epoch {epoch} failed, which exceeds the budget "
            f"of {budget} in on_error={self.policy!r}; loader.profile().quarantined lists them"
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
        self,
        worker: Worker,
        chunk: Chunk,
        failed: dict[int, BaseException],
        work: Callable[[int, Any], None],
    ) -> list[int] | Failure:
        """Skip or replace the failed rows; returns the rows that are left, or the first failure that ends the epoch.

        ``work(row, sample)`` does a row with a substitute sample, or puts a result there: by the method ``row_by``.
        """
        dropped = set()
        for index, error in sorted(failed.items()):
            worker.meter.failed += 1
            one = chunk.row(index, None)
            if self.outcome.ends or not isinstance(error, Exception):
                return self._give_up(one, error)
            made = self._instead(worker, one, error, index, partial(_in_place, work, index))
            if isinstance(made, Exception):
                return self._give_up(one, made)
            if made is None:
                dropped.add(index)
            else:
                chunk.keys = (*chunk.keys[:index], made.keys[0], *chunk.keys[index + 1 :])
        return [index for index in range(len(chunk.row_lineages)) if index not in dropped]

    # -- what takes a failed item's place --------------------------------------------------------

    def _instead(
        self,
        worker: Worker,
        failed: Chunk,
        error: Exception,
        row: int,
        work: Callable[[Chunk], Chunk],
        made: int = 0,
    ) -> Chunk | Exception | None:
        """What takes the place of a failed item, None for nothing, or the error with which the epoch ends.

        ``work`` does this stage's work on a substitute, or puts a result in its place.
        """
        problem = self._judge(worker, failed, error, row, made)
        if problem is not None:
            return problem
        policy, stage = self.outcome, self.stage
        if policy.substitutes == "input":  # a row's work draws from the generator that is current
            Draws(stage.run.seed, stage.name).one(failed.epoch, failed.lineages[0])
        try:
            given = policy.instead(failed, error, partial(self._candidates, worker, failed))
            check_instead(policy, given)
            if given is None or isinstance(given, Exception):
                return given
            for each in given:
                if not isinstance(each, Chunk) or each.lineages != failed.lineages:
                    raise GraphError(
                        f"on_error={policy!r}: instead() gave {shown(each)}, which is no chunk of the failed sample: "
                        "give failed.replace(data)"
                    )
                each.data = copy_containers(each.data)
                if policy.substitutes == "output":
                    return work(each)
                with suppress(Exception):
                    if isinstance(done := work(each), Chunk):
                        return done
        except Exception as wrong:
            note(wrong, f"pipegraph: raised by on_error={policy!r} for {described(error)}")
            return wrong
        return error

    def _whole(self, worker: Worker) -> Callable[[Chunk], Chunk]:
        """The work of this stage on a whole chunk; a source has done it once the sample is read."""
        if self.stage.plan.source is not None or self.outcome.substitutes == "output":
            return lambda sample: sample
        return self.seeded(worker.operator.process)

    def _candidates(self, worker: Worker, chunk: Chunk, tries: int) -> Iterator[Chunk]:
        """Yield substitutes, drawn from the position's window and processed up to this stage's input."""
        stage = self.stage
        chain = substitutes(stage, worker)
        top = [stage.plan, *lineage_above(stage.plan, stage.run.plan.stages)][-1]
        if top.operator.can(Neighbours) is None:
            return
        source: Any = chain[0]  # a Source, or a proxy of one in a process
        row = chunk.lineages[0]
        draws = Draws(stage.run.seed, stage.name)
        for attempt in range(tries):
            draws.one(chunk.epoch, row)
            position = source.substitute(row[1], chunk.epoch, attempt)
            if position is None:
                continue  # the only sample in its window: the next draw is from other blocks
            try:
                item = source.read(position, chunk.epoch)
                one = Chunk(item, (row,), chunk.epoch, chunk.before, chunk.after)
                one.keys = (position,) if not isinstance(item, dict) or "key" not in item else (item["key"],)
                for operator in chain[1:]:
                    assert isinstance(operator, Operator)
                    draws.again()
                    one = operator.process(one)
            except Exception:
                continue
            yield one


def _in_place(work: Callable[[int, Any], None], index: int, sample: Chunk) -> Chunk:
    """Do row ``index`` with another sample."""
    work(index, sample.data)
    return sample


def substitutes(stage: StageContext, worker: Worker) -> list[Operator | Source]:
    """A worker's own source and one-to-one stages above ``stage``, opened for substitutes at first need."""
    if worker.chain is not None:
        return worker.chain
    chain: list[Operator | Source] = []
    for above in reversed(lineage_above(stage.plan, stage.run.plan.stages)):
        if above.bypassed is None and not above.kind.gathers and not above.caches:
            operator = copy.copy(above.operator)
            operator.open(stage.run.context(above.name, worker.index))
            worker.substituting.append(operator)
            chain.append(operator)
    worker.chain = [worker.operator] if stage.plan.source is not None else chain
    return worker.chain
