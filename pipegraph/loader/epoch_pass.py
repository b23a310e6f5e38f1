"""The iterator over one epoch, held by a ``for`` loop."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NoReturn

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, EndOfEpoch, Failure
from pipegraph.durations import BATCH
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.crew import Crew
from pipegraph.engine.run import Run
from pipegraph.engine.stage.hand_over import rows_of
from pipegraph.errors import LoaderClosedError, as_raised
from pipegraph.loader.pass_totals import Interval, PassTotals

if TYPE_CHECKING:
    from pipegraph.loader.equal_steps import Agreement
    from pipegraph.loader.loader import Loader


FINISHED = "all was delivered"
"""Why a pass is over that has not been ended."""

ENDLESS = sys.maxsize
"""As a number of steps: nothing ends the pass before its data does."""


class Pass:
    """The iterator over one epoch: delivers and counts its chunks, until the end, a failure, or :meth:`end`.

    Attributes:
        why_over: why it delivers nothing more; "" while it runs. Several threads may end it: the first one's counts.
        own: rank and world size.
        turn: the loader's lock. Several threads may share a pass: each chunk goes to one of them.

    A pass ends at once when its last reference goes, so nothing that it refers to may refer back to it.
    """

    why_over = "it has not begun"

    def __init__(
        self, loader: Loader, crew: Crew, totals: PassTotals, run: Run, interval: Interval, whole: bool
    ) -> None:
        self._loader = loader  # keeps the loader alive: its finalizer ends the threads
        self._crew = crew
        self._totals = totals
        self.own = (crew.rank, crew.world_size)
        self._run = run
        self._interval = interval
        self._progress = progress = loader._progress
        self._place = progress.place
        self.turn = loader._turn
        self.epoch = self._place.epoch
        self._take = run.terminal.take
        self._waits = progress.waits.noted
        self._release = run.account.release
        self._whole = whole
        # Called before a chunk is taken, with the number of those delivered so far.
        self._observers = [observer.asked for observer in loader._observers]
        self._counted = progress.counted or self._place.delivered is not None
        self._agreement: Agreement | None = None
        # Steps of the epoch: before this pass, and those that are delivered without asking.
        self._first = self._until = self._place.steps
        self._rest: list[Chunk] = []  # remaining chunks of a bundle, in reverse order
        self._quick: deque[Any] = deque()  # its rows before the last, if only their number matters
        self._plain = not whole and not self._counted
        if loader._group is not None:
            from pipegraph.loader.equal_steps import Agreement, minimum_over

            self._agreement = Agreement(minimum_over(loader._group))
        self.why_over = ""  # last: a pass interrupted before this has not begun

    @property
    def over(self) -> bool:
        return bool(self.why_over)

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        # Three places a row may come from: ``_quick``, data of a bundle taken before; ``_rest``, rows of one that need
        # more than their data (in reverse order); the last queue.
        # No lock, no counting: ``popleft`` is atomic, and what is left says how many rows were delivered.
        if not self._run.over and self._quick:
            try:
                return self._quick.popleft()
            except IndexError:
                pass  # another thread has had the last one
        with self.turn:
            if self.why_over:
                self._refuse()
            try:
                progress = self._progress
                if not self._run.over and self._quick:  # another thread may have set it meanwhile
                    try:
                        return self._quick.popleft()
                    except IndexError:
                        pass
                steps, until = 0, self._until
                if until != ENDLESS:
                    steps = self._place.steps
                    if steps >= until:
                        until = self._until = self._ask(steps)
                if self._rest:
                    if self._run.over:
                        raise Cancelled
                    item = self._rest.pop()
                else:
                    for observe in self._observers:
                        observe(progress.items)
                    asked = perf_counter_ns()
                    while not isinstance(item := self._take()[1], Chunk):
                        self._token(item)
                    now = perf_counter_ns()
                    self._waits.append(now - asked)
                    if len(self._waits) >= BATCH:
                        progress.waits.count()
                    if self._run.tracer.on:
                        self._run.tracer.delivered(asked, item)
                    progress.first_batch_ns = progress.first_batch_ns or now
                    if item.__class__ is Bundle:
                        progress.waits.note_none(item.count - 1)
                        quick = min(item.count, until - steps) - 1
                        if self._plain and quick > 0:
                            # All rows but the last, which releases the bundle's buffers.
                            self._rest = [item.one(row) for row in range(item.count - 1, quick - 1, -1)]
                            self._rest[0].buffers = item.buffers
                            self._quick = self._place.take(item.data[:quick], item.afters())
                            try:
                                return self._quick.popleft()
                            except IndexError:  # other threads have had all of them
                                pass
                        else:
                            self._rest = rows_of(item, self._run.account)[::-1]
                        item = self._rest.pop()
                if item.buffers:
                    self._release(item.buffers)
                for event in item.ready:
                    event.delivered(item.data)
                # Last: a chunk interrupted before this was not delivered.
                if self._counted:
                    progress.count(self._place, item, self._run)
                else:
                    self._place.advance(item.after, len(item.lineages))
                return item if self._whole else item.data
            except StopIteration:
                raise
            except Cancelled:
                self._cancelled()
            except BaseException:
                item = None  # else the error's traceback would hold the error, and with it the loader
                if not self.over:
                    self._fail("it was interrupted")
                raise

    def _waiting(self) -> tuple[int, Any]:
        """As the last queue's ``waiting``, with the rows already taken from it."""
        chunks, token = self._run.terminal.waiting()
        return chunks + len(self._rest), token

    def end(self, why: str) -> None:
        """End the pass: it delivers nothing more, not even rows that it has taken."""
        self.why_over = self.why_over or why
        self._quick = deque()

    def _refuse(self) -> None:
        if self.why_over is FINISHED:
            raise StopIteration
        raise LoaderClosedError(f"this pass (epoch {self.epoch}) is over: {self.why_over}")

    def sure(self) -> tuple[int, bool]:
        """How many chunks this rank is sure of now; see :mod:`pipegraph.loader.equal_steps`."""
        if self._place.nothing:
            return self._place.steps - self._first, True  # the other ranks still wait for this one's report
        chunks, token = self._waiting()
        ended = isinstance(token, EndOfEpoch) and token.epoch == self.epoch and not self._place.later
        if chunks == 0 and isinstance(token, Failure):
            self._token(self._take()[1])
        return self._place.steps - self._first + chunks, ended

    def wait_for_more(self) -> None:
        """Wait for a chunk or the end of this epoch; drops the end of an earlier one that all ranks cut short."""
        while not self._place.nothing:
            if not self._rest:
                self._run.terminal.peek()
            chunks, token = self._waiting()
            if chunks or not isinstance(token, EndOfEpoch) or token.epoch == self.epoch:
                return
            self._take()

    def _ask(self, steps: int) -> int:
        """How many steps of the epoch may be delivered before this is asked again; raises StopIteration to end it."""
        agreement = self._agreement
        if agreement is None:
            if self._place.nothing:
                self._finish()
            return ENDLESS
        if not agreement.may_deliver(steps - self._first, self):
            self._cut_short()
        return self._first + agreement.allowed

    def _cut_short(self) -> NoReturn:
        """End the pass here, although this rank may have more chunks of the epoch."""
        self._run.discard_output(self.epoch)
        while self._rest:
            self._release(self._rest.pop().buffers)
        self._finish()

    def _finish(self) -> NoReturn:
        self.why_over = self.why_over or FINISHED
        self._totals.end()
        self._progress.pass_finished(self._place)
        raise StopIteration

    def _token(self, item: Any) -> None:
        """Handle a token that ends the pass or its part; return for any other."""
        if isinstance(item, EndOfEpoch) and item.epoch == self.epoch:
            if not self._place.later:
                self._finish()
            self._take_over()
        if isinstance(item, Failure):
            self._fail("a stage failed", failed=True)
            try:
                raise as_raised(item.error, "a stage")
            finally:
                del item

    def _take_over(self) -> None:
        """This part of the epoch is delivered: continue with the next one taken over from another rank."""
        place, crew = self._progress.following(self._place, self.own), self._crew
        self._totals.end()
        crew.end_run()  # its workers may still write into the ledger
        crew.ledger.begin()
        run = self._run = crew.start_run(self.epoch, self.epoch, place.resume())
        self._interval = self._totals.begin(run)
        self._progress.enter(place, run)
        self._place = place
        self._take, self._release = run.terminal.take, run.account.release

    def _cancelled(self) -> None:
        if self.over:  # another thread ended the pass, and has cleaned up
            self._refuse()
        error, self._run.error = self._run.error, None
        failed = error is not None
        self._fail("a stage failed" if failed else "the loader was closed", failed)
        if error is not None:
            try:
                raise as_raised(error, "a stage")
            finally:
                del error
        raise LoaderClosedError(f"this pass (epoch {self.epoch}) is over: the loader was closed")

    def _fail(self, why: str, failed: bool = False) -> None:
        self._progress.broken(failed)
        self._run.cancel()
        self._totals.end()
        self.end(why)  # last: if this is interrupted, it is done again

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # After a ``break``. Sets only flags of its own: the garbage collector may call this in any thread. While the
        # interpreter exits, modules may be cleared already and nothing reads the flags.
        if not finalizing() and not self.over:
            self.end("it was left")
            self._interval.leave()
