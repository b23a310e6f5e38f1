"""One pass over one epoch: the iterator that a training loop's ``for`` holds."""

from __future__ import annotations

import threading
from time import perf_counter_ns
from typing import Any, NoReturn

from pipegraph.activity import Cancelled
from pipegraph.agreement import Agreement, Sure, minimum_over
from pipegraph.chunk import Chunk, EndOfEpoch, Failure
from pipegraph.errors import LoaderClosedError
from pipegraph.progress import Progress
from pipegraph.run import Run
from pipegraph.runtime import Runtime


class Pass:
    """Delivers the chunks of one epoch, counts them, and ends at the end, at a failure or when told to.

    Attributes:
        over: why it has ended, ``""`` while it has not.
        turn: the loader's. Several threads may share a pass: each chunk goes to one of them.
    """

    def __init__(
        self,
        loader: object,
        turn: threading.RLock,
        runtime: Runtime,
        run: Run,
        progress: Progress,
        group: Any,
        whole: bool,
    ) -> None:
        self._loader = loader  # whose end is the threads' end: it lives as long as its pass
        self._runtime = runtime
        self._own = (runtime.rank, runtime.world_size)
        self._run = run
        self._progress = progress
        self._place = progress.place
        self.turn = turn
        self.epoch = self._place.epoch
        self.over = ""
        self._get = run.terminal.get
        self._release = run.account.release
        self._whole = whole
        self._counted = progress.counted
        self._agreement: Agreement | None = None
        self._step = 0
        if group is not None:
            self._agreement = Agreement(minimum_over(group), self._sure, self._await_own)

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        with self.turn:
            if self.over:
                self._refuse()
            if self._place.nothing:
                self._finish()
            try:
                if self._agreement is not None:
                    self._agree(self._agreement)
                item = self._get()
                while item.__class__ is not Chunk:
                    self._token(item)
                    item = self._get()
            except StopIteration:
                raise
            except Cancelled:
                self._cancelled()
            except BaseException:
                item = None  # else the error's traceback would hold the error, and with it the loader
                if not self.over:
                    self._fail("it was interrupted")
                raise
            if item.buffers:
                self._release(item.buffers)
            for event in item.ready:
                event.wait()
            progress = self._progress
            if self._counted:
                progress.count(self._place, item, self._run)
            else:
                self._place.cursor = item.after
            progress.items += 1
            progress.samples += len(item.rows)
            if not progress.first_batch_ns:
                progress.first_batch_ns = perf_counter_ns()
            return item if self._whole else item.data

    def _refuse(self) -> None:
        if self.over == "finished":
            raise StopIteration
        raise LoaderClosedError(f"this pass (epoch {self.epoch}) is over: {self.over}")

    def _sure(self) -> Sure:
        chunks, token = self._run.terminal.ahead()
        ended = isinstance(token, EndOfEpoch) and token.epoch == self.epoch and not self._place.later
        if chunks == 0 and isinstance(token, Failure):
            self._token(self._get())
        return Sure(self._step + chunks, ended)

    def _await_own(self) -> None:
        """Wait for a chunk or the end of this epoch; drops the end of one that was cut short for other ranks' sake."""
        while True:
            self._run.terminal.peek()
            chunks, token = self._run.terminal.ahead()
            if chunks or not isinstance(token, EndOfEpoch) or token.epoch == self.epoch:
                return
            self._get()

    def _agree(self, agreement: Agreement) -> None:
        """Raises StopIteration at the step at which all ranks end."""
        if agreement.may_deliver(self._step):
            self._step += 1
            return
        for chunk in self._run.terminal.discard(self.epoch):
            self._release(chunk.buffers)
        self._finish()

    def _finish(self) -> NoReturn:
        self.over = "finished"
        self._end(finished=True)
        raise StopIteration

    def _end(self, finished: bool) -> None:
        self._runtime.tally.end()
        self._progress.pass_over(finished, self.epoch)

    def _token(self, item: Any) -> None:
        """Ends the pass, or returns for a token that means nothing here."""
        if isinstance(item, EndOfEpoch) and item.epoch == self.epoch:
            if not self._place.later:
                self._finish()
            self._take_over()
        if isinstance(item, Failure):
            self._fail("a stage failed")
            try:
                raise item.error
            finally:
                del item

    def _take_over(self) -> None:
        """This part of the epoch is delivered: go on with the next of another rank's."""
        place, runtime = self._place, self._runtime
        with place.lock:
            place.enter(place.later, (-1, 0) if place.stream is None else self._own)
        runtime.tally.end()
        runtime.end_run()  # its workers may still write into the ledger
        runtime.ledger.take_over(self.epoch)
        run = self._run = runtime.start_run(self.epoch, self.epoch, place.resume())
        place.goes_on_in(run)
        runtime.tally.begin(run)
        self._get, self._release = run.terminal.get, run.account.release

    def _cancelled(self) -> None:
        if self.over:  # ended from another thread, which has done the rest
            self._refuse()
        error, self._run.error = self._run.error, None
        self._fail("a stage failed" if error is not None else "the loader was closed")
        if error is not None:
            try:
                raise error
            finally:
                del error
        raise LoaderClosedError(f"this pass (epoch {self.epoch}) is over: the loader was closed")

    def _fail(self, why: str) -> None:
        self.over = why
        self._run.cancel()
        self._end(finished=False)

    def __del__(self) -> None:
        # After a break. Only flags: the garbage collector may call this in any thread.
        if not self.over:
            self.over = "it was left"
            self._runtime.tally.leave()
            self._progress.pass_over(False, self.epoch)
