"""Applies a stage's error policy. The policies themselves are values in ``pipegraph.policies``."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from pipegraph import concurrency
from pipegraph.chunk import Chunk, EndOfEpoch, Failure
from pipegraph.contracts import Operator, Source
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.stage.budgets import Quarantined
from pipegraph.engine.stage.failure_notes import explain, where
from pipegraph.engine.stage.stage_context import StageContext
from pipegraph.engine.stage_worker import Worker
from pipegraph.errors import BudgetError, StageTimeoutError, WorkerDiedError, described, note
from pipegraph.global_generators import Draws, drawing
from pipegraph.planning.plan import lineage_above
from pipegraph.policies import Replace, Retry, Skip, exceeded, final_policy, is_share
from pipegraph.tree import copy_containers

log = logging.getLogger("pipegraph")


def is_interrupt(stage: StageContext, error: BaseException) -> bool:
    """Whether it is a Ctrl-C that came while an inline stage ran in the main thread, not an error of the stage."""
    return (
        isinstance(error, KeyboardInterrupt)
        and stage.plan.backend == "inline"
        and concurrency.current_thread() is concurrency.main_thread()
    )


class Failures:
    """The failure handler of one stage in one run.

    Ordered stages check budgets in item order: a worker with a failed item waits until all earlier
    items have left, so that timing never decides which failure exceeds a budget.
    """

    def __init__(self, stage: StageContext) -> None:
        self.stage = stage
        self.policy = stage.plan.spec.on_error
        self.final = final_policy(self.policy)
        self.name = stage.plan.judged
        self.judges_epochs = isinstance(self.final, Skip | Replace) and is_share(self.final.budget)

    def guard(self, worker: Worker, process: Callable[[Chunk], Any]) -> Callable[[Chunk], Any]:
        """Wrap ``process`` with retries, if the policy has any."""
        if not isinstance(self.policy, Retry):
            return process

        def retrying(chunk: Chunk) -> Any:
            original = chunk.data

            def attempt() -> Any:
                # A function that failed may have changed its containers.
                return process(chunk.replace(copy_containers(original)))

            return self.retry(worker, attempt)

        return retrying

    def numbered(self, call: Callable[[Chunk], Any]) -> Callable[[Chunk], Any]:
        """Wrap ``call`` to draw from the chunk's generator, unless the operator does so itself."""
        if self.stage.plan.operator.own_numbers:
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
        policy = self.policy
        process = self.numbered(process)
        if not isinstance(policy, Retry):
            return process

        def retrying(chunk: Chunk) -> Iterator[Any]:
            original, done = chunk.data, 0
            for turn in range(policy.times + 1):
                try:
                    made = process(chunk.replace(copy_containers(original)))
                    for child in islice(made, done, None):
                        done += 1
                        yield child
                    return
                except Exception:
                    if turn == policy.times:
                        raise
                    self._before_retry(worker, policy, turn)

        return retrying

    def _before_retry(self, worker: Worker, policy: Retry, turn: int) -> None:
        worker.meter.retried += 1
        if policy.backoff and self.stage.run.stopping.wait(policy.backoff * 2**turn):
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
        policy = self.policy
        if not isinstance(policy, Retry) or not isinstance(error, Exception):
            try:
                raise error
            finally:
                del error
        for turn in range(policy.times):
            self._before_retry(worker, policy, turn)
            try:
                return attempt()
            except Exception as again:
                error = again
        try:
            raise error
        finally:
            del error

    def handle(
        self, worker: Worker, chunk: Chunk, error: BaseException, row: int = 0
    ) -> Chunk | Failure | None:
        """Apply the policy to a failed chunk; returns a substitute, None (skipped), or the failure.

        ``row`` is its index in its bundle.

        Called inside ``except BaseException``. Exceptions that end the run are raised again; so is Ctrl-C, which
        an inline stage may get in its consumer's thread.
        """
        if isinstance(error, Cancelled) or is_interrupt(self.stage, error):
            raise error
        meter, name = worker.meter, self.stage.name
        if self.stage.plan.followers:
            member = worker.operator.failed_in
            meter, name = worker.members[member], [name, *(s.name for s in self.stage.plan.followers)][member]
        meter.failed += 1
        if (
            self.final == "raise"
            or not isinstance(error, Exception)
            or self._loses_state(error)
            or name != self.name
        ):
            return self._give_up(chunk, error, name)
        problem = self._judge(worker, chunk, error, row)
        if problem is not None:
            return self._give_up(chunk, problem)
        if isinstance(self.final, Skip):
            return None
        substitute = self._substitute(worker, chunk)
        return self._give_up(chunk, error) if substitute is None else substitute

    def made_instead(
        self, worker: Worker, chunk: Chunk | None, error: BaseException, epoch: int
    ) -> list[Any]:
        """As :meth:`handle`, for calls that return several chunks; ``chunk`` is None for one at the end of an epoch.

        Called inside ``except BaseException``.
        """
        failure: Chunk | Failure | None
        if chunk is not None:
            failure = self.handle(worker, chunk, error)
        elif isinstance(error, Exception):
            note(error, f"pipegraph: stage {self.stage.name!r}, at the end of epoch {epoch}")
            failure = Failure(error, epoch)
        else:
            raise error
        return [] if failure is None else [failure]

    def _loses_state(self, error: Exception) -> bool:
        """Whether the operator's state was lost with its process, so that no policy can continue."""
        operator = self.stage.plan.operator
        return (
            isinstance(error, WorkerDiedError | StageTimeoutError)
            and isinstance(operator, Operator)
            and (operator.kind == "regroup" or operator.stateful)
        )

    def _give_up(self, chunk: Chunk, error: BaseException, name: str = "") -> Failure:
        error = explain(error, name or self.name, chunk)
        if not self.stage.in_order:
            self.stage.run.fail(error)
            raise Cancelled
        return Failure(error, chunk.epoch)

    def _judge(self, worker: Worker, chunk: Chunk, error: Exception, row: int = 0) -> Exception | None:
        """Record the failure, or return the error that exceeds the budget."""
        stage, name = self.stage, self.name
        assert isinstance(self.final, Skip | Replace)
        stage.wait_turn(worker.ticket)
        ledger = stage.run.ledger
        with stage.judging:
            ordinal = stage.ordinals.of(worker.ticket, chunk, row)
            failed = ledger.failed(name, chunk.epoch) + 1
            # In completion order, later items may have failed earlier: count them as items too.
            items = max(ordinal, ledger.last_failed(name, chunk.epoch))
            if exceeded(self.final.budget, failed, items):
                note(
                    error,
                    f"pipegraph: stage {name!r}: failure {failed} of {items} items exceeds the budget "
                    f"of {self.final.budget} in on_error={self.policy!r}",
                )
                return error
            what = described(error)
            lost = [
                (row, Quarantined(key, row[1], chunk.epoch, name, what))
                for key, row in zip(chunk.keys, chunk.lineages, strict=True)
            ]
            first = ledger.add(name, chunk.epoch, ordinal, lost)
        if first:
            became = "was left out" if isinstance(self.final, Skip) else "was replaced"
            log.warning(
                "stage %r: %s, %s: %s. on_error=%r says so; further ones are only counted, and listed in "
                "loader.profile().quarantined",
                *(name, where(chunk), became, what, self.policy),
            )
        return None

    # -- the end of an epoch -------------------------------------------------------------------

    def at_end(self, epoch: int) -> Failure | None:
        """The failure to send at the end of an epoch if too large a share of its items failed; else None."""
        stage = self.stage
        if not self.judges_epochs or stage.stop_epoch >= epoch:  # the epoch was cut short
            return None
        assert isinstance(self.final, Skip | Replace)
        budget = self.final.budget
        assert budget is not None
        if not stage.numbers_taken:
            stage.ordinals.number(0, EndOfEpoch(epoch))
        items, failed = stage.ordinals.total(epoch), stage.run.ledger.failed(self.name, epoch)
        if not failed or failed / max(1, items) <= budget:
            return None
        error = BudgetError(
            f"stage {self.name!r}: {failed} of the {items} items of epoch {epoch} failed, which exceeds the budget "
            f"of {budget} in on_error={self.policy!r}; loader.profile().quarantined lists them"
        )
        return Failure(error, epoch)

    # -- rows of a batch -----------------------------------------------------------------------

    def do_row(self, worker: Worker, work: Callable[[], None]) -> Exception | None:
        """Do one row, with retries if the policy has any; returns its error, if it failed."""
        try:
            if isinstance(self.policy, Retry):
                self.retry(worker, work)
            else:
                work()
        except Exception as error:
            return error
        return None

    def judge_rows(
        self,
        worker: Worker,
        chunk: Chunk,
        failed: dict[int, Exception],
        work: Callable[[int, Any], None],
    ) -> list[int] | Failure:
        """Skip or replace the failed rows; returns the rows that are left, or the first failure that ends the epoch.

        ``work(row, sample)`` does a row with a substitute sample.
        """
        dropped = set()
        for index, error in sorted(failed.items()):
            worker.meter.failed += 1
            one = chunk.row(index, None)
            if self.final == "raise":
                return self._give_up(one, error)
            problem = self._judge(worker, one, error, index)
            if problem is not None:
                return self._give_up(one, problem)
            if isinstance(self.final, Skip):
                dropped.add(index)
            elif not self._replace_row(worker, chunk, index, work):
                return self._give_up(one, error)
        return [index for index in range(len(chunk.row_lineages)) if index not in dropped]

    def _replace_row(
        self, worker: Worker, chunk: Chunk, index: int, work: Callable[[int, Any], None]
    ) -> bool:
        for sample in self._candidates(worker, chunk.row(index, None)):
            try:
                work(index, sample.data)
            except Exception:
                continue
            keys = list(chunk.keys)
            keys[index] = sample.keys[0]
            chunk.keys = tuple(keys)
            return True
        return False

    # -- substitutes ---------------------------------------------------------------------------

    def _substitute(self, worker: Worker, chunk: Chunk) -> Chunk | None:
        operator = self.stage.plan.operator
        for candidate in self._candidates(worker, chunk):
            if isinstance(operator, Source):
                return candidate
            try:
                made: Chunk = self.numbered(worker.operator.process)(candidate)
            except Cancelled:
                raise
            except Exception:
                continue
            return made
        return None

    def _candidates(self, worker: Worker, chunk: Chunk) -> Iterator[Chunk]:
        """Yield substitutes, drawn from the position's window and processed up to this stage's input."""
        assert isinstance(self.final, Replace)
        stage = self.stage
        chain = substitutes(stage, worker)
        source: Any = chain[0]  # a Source, or a proxy of one in a process
        row = chunk.lineages[0]
        draws = Draws(stage.run.seed, stage.name)
        for attempt in range(self.final.tries):
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
            except Cancelled:
                raise
            except Exception:
                continue
            yield one


def substitutes(stage: StageContext, worker: Worker) -> list[Operator | Source]:
    """A worker's own source and one-to-one stages above ``stage``, opened for substitutes at first need."""
    if worker.chain is not None:
        return worker.chain
    chain: list[Operator | Source] = []
    for above in reversed(lineage_above(stage.plan, stage.run.plan.stages)):
        if above.bypassed is None and above.operator.kind in ("source", "map"):
            operator = copy.copy(above.operator)
            operator.open(stage.run.context(above.name, worker.index))
            worker.substituting.append(operator)
            chain.append(operator)
    worker.chain = [worker.operator] if isinstance(stage.plan.operator, Source) else chain
    return worker.chain
