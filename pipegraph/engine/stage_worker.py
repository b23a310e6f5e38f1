"""A worker of a stage, which lives as long as the loader: its opened copy of the operator, and its counters.

Its own thread steps its loop. That of an inline stage is stepped by the threads that wait for its output, one at a time
(``StagePump``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipegraph import concurrency, global_generators, torch_modes
from pipegraph.engine.activity import Cancelled, Leaving
from pipegraph.engine.meter import Meter
from pipegraph.errors import note

if TYPE_CHECKING:
    from pipegraph.engine.run import Run


Loop = Iterator[Any]
"""The loop of a worker in a run. It yields where a unit of work has ended: None, or one of the two below."""

HALFWAY = object()
"""The worker cannot leave here: it is in the middle of an item, or has taken the next one ahead."""

MORE = object()
"""The next step of the loop will not block."""


@dataclass(eq=False, repr=False)
class Worker:
    """A worker of a stage.

    Attributes:
        meter: its counters.
        ticket: of the item that it has taken.
        whole: whether its last block was done in one go, without a failure.
        ready: whether it takes part: its operator is open, and it has not begun to leave.
        late: whether the first run does not wait for it: a tuner has added it, or its backend lets the first worker of
            each stage go before the others (``joins_late``). It joins the run that it finds, once it is open.
        leaves: whether it ends after its current unit of work.
        thread: None for that of an inline stage.
        run: the run that its thread is in.
        initial: the state with which a stateful operator starts each epoch.
    """

    index: int
    operator: Any
    meter: Meter = field(default_factory=Meter)
    ticket: int = 0
    whole: bool = True
    ready: bool = False
    late: bool = False
    leaves: bool = False
    thread: concurrency.Thread | None = None
    run: Run | None = None
    initial: object = None


class StagePump:
    """The pump of an inline stage: threads that wait for its output step its loop, one thread at a time.

    Args:
        left: called when a driver has left.
        stage: whose loop it is, for a note on its errors.
        fail: is given an error of the loop: the thread that drives it works for another stage, which could take the
            error for one of its item's, or drop it.

    Attributes:
        more: whether the next step will not wait for another thread.
    """

    def __init__(
        self, loop: Loop, left: Callable[[], None], stage: str, fail: Callable[[BaseException], None]
    ) -> None:
        self._loop = loop
        self._left = left
        self._stage = stage
        self._fail = fail
        self._lock = concurrency.Lock()
        self._busy = False
        self._over = False
        self.more = False

    def try_enter(self) -> bool:
        """Become the driver; False while another thread is."""
        with self._lock:
            if self._busy:
                return False
            self._busy = True
            return True

    def step(self) -> None:
        """Do one unit of work."""
        self.more = False
        inference, autocast, device = torch_modes.without()
        try:
            # Outside of steps the consumer's thread keeps its own generators and modes.
            with global_generators.included(), inference, autocast, device:
                for pause in self._loop:
                    self.more = pause is MORE
                    return
        except (Cancelled, Leaving):
            raise
        except BaseException as error:
            here = concurrency.current_thread()
            if isinstance(error, KeyboardInterrupt) and here is concurrency.main_thread():
                raise
            note(error, f"pipegraph: in stage {self._stage!r}")
            self._fail(error)
        raise Cancelled

    def leave(self) -> None:
        """Let others drive, then wake another waiter: it may have found the driver busy."""
        with self._lock:
            self._busy = over = self._over
        if over:
            self._close()
        self._left()

    def end(self) -> None:
        """Let nobody drive any more: close the loop, and what it holds open, such as a user's generator.

        If a thread is still driving, it closes the loop when it leaves.
        """
        with self._lock:
            busy, self._busy, self._over = self._busy, True, True
        if not busy:
            self._close()

    def _close(self) -> None:
        # Not kept: Python 3.12.3 clears a closed generator's frame only with the generator; 3.12 to 3.14 do so where it
        # never began (gh-118272, gh-142766).
        loop, self._loop = self._loop, iter(())
        assert isinstance(loop, Generator)
        loop.close()
