"""The host of one worker of a remote stage, in the trainer: starts a child, calls it, restarts it, ends it.

What is a backend's own: :meth:`Host._live` starts a child, and its :class:`~.contract.Link` carries messages to it.
Behaviour contract (what differs from this is a bug):

* One thread calls; ``cancel`` may be called by any thread at any moment, and ends a waiting call with ``Cancelled``.
  The answer to such a call is dropped: before the next call, or never read.
* A death is noticed as it happens, not by a timeout: the call raises :class:`Died`, with the reason and the row in
  work. The next call starts a new child, which opens the operator again.
* When a row passes its deadline the child is asked where it stands and ended; the call raises :class:`Overdue`.
* Calls may be sent before earlier ones are answered (:meth:`Host.ahead`). They are answered in order, each to whom it
  belongs: a death or a deadline is the outcome of the call in work; those behind it are lost, and sent again when
  their answer is asked for.
* ``close`` gives the child ``grace_s`` to close its operator, then ends it, even in the middle of an item.

Waiting is one ``poll`` on three descriptors: the answer, the child's end, and cancellation.
"""

from __future__ import annotations

import math
import selectors
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pipegraph import concurrency
from pipegraph.contracts import Context
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.remote.contract import (
    GRACE_S,
    NOTHING,
    Call,
    Died,
    Flag,
    Link,
    Overdue,
    Unreadable,
    stopped_s,
)
from pipegraph.engine.remote.exceptions import Carried

STARTS = 3
"""How often to start a child that dies before it has opened the operator."""

SELECTOR: type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.SelectSelector)


class Host(ABC):
    """See the module docstring.

    Args:
        context: of the stage, notified of what its operator counts; a stop cancels a start.
        opening: the first message to each child, which it answers when it has opened the operator.
        timeout_s: limit for one row; None: no limit.

    Attributes:
        place: where the operator is, for messages: ``"process"``.
        gave_up: what was done with a child that hangs, for messages: ``"its process was ended"``.
        deaths: children that died.
        ended: children that are no more.
    """

    place: str
    gave_up: str

    def __init__(self, context: Context, opening: object, timeout_s: float | None) -> None:
        self._context = context
        self._opening = opening
        self._timeout_s = timeout_s
        self._running: Link | None = None  # none: the next call starts a child
        self._started = False  # and not closed since
        self._due: deque[Call] = deque()  # sent, and not answered yet
        self._wake = Flag()  # open from the first start to the end
        self.deaths = self.ended = 0

    @property
    def pid(self) -> int | None:
        return None if self._running is None else self._running.pid

    @property
    def _link(self) -> Link:
        assert self._running is not None
        return self._running

    # -- starting ------------------------------------------------------------------------------

    @abstractmethod
    def _live(self, wake: int) -> Link:
        """Start a child; what waits in it ends with ``Cancelled`` as soon as ``wake`` is readable.

        Raises:
            Died: it cannot be started.
        """

    def start(self) -> None:
        """Start a child and open the operator in it.

        Raises:
            Exception: ``open`` raised it there.
            Died: it ended during its start, each time.
            Cancelled: the trainer stops.
        """
        if not self._started:
            self._wake.open()
            self._started = True
        ends = 0
        while ends < STARTS:
            try:
                with self._context.stopping.ending(self.cancel):
                    return self._start()
            except Died as died:
                reason = f"{died.reason}, each time that it was started"
                again = replace(died, reason=reason, row=NOTHING)  # without its traceback
                ends += self._is_own(died)
        try:
            raise again
        finally:
            del again  # its traceback refers to this frame

    def _is_own(self, died: Died) -> bool:
        """Whether an end during a start counts as the child's own."""
        return True

    def _start(self) -> None:
        self._running = self._live(self._wake.fileno())
        self._selector = SELECTOR()
        for fd in (self._running.answers, self._running.ended, self._wake.fileno()):
            if fd is not None:
                self._selector.register(fd, selectors.EVENT_READ)
        try:
            opening = Call("open")
            self._send(opening, self._opening)
            self._opened(opening)
        except BaseException:
            self._kill()
            raise

    def _opened(self, opening: Call) -> None:
        """Wait until the operator is open."""
        self.answer(opening, limited=False)

    # -- calls ---------------------------------------------------------------------------------

    def begin(self, call: Call) -> None:
        """Send a call before its answer is asked for; starts a child if there is none."""
        while not call.sent and call.outcome is None:
            if self._running is None:
                self.start()
            elif self._due and self._link.alone:
                self._take_answer(self._timeout_s)
            else:
                self._send(call, (call.name, call.args))

    def ahead(self, call: Call) -> None:
        """As :meth:`begin`, if that needs no wait: neither answers nor blame depend on it."""
        if self._running is not None and not (self._due and self._link.alone):
            with suppress(Exception):  # ``begin`` will raise it
                self._link.send((call.name, call.args), wait=False)
                self._due.append(call)
                call.sent = True

    def answer(self, call: Call, limited: bool = True) -> Any:
        """The answer to a call, which is sent now if it was not before.

        Raises:
            Exception: the method raised it, or the arguments or the result could not be sent.
            Died, Overdue: no answer is lost or doubled: the caller sends the rows again.
            Cancelled: :meth:`cancel` was called; the answer is dropped whenever it comes.
        """
        while call.outcome is None:
            self.begin(call)
            if call.outcome is None:
                self._take_answer(self._timeout_s if limited else None)
        result, error = call.outcome
        if error is None:
            return result
        try:
            raise error
        finally:
            call.outcome = None  # the error's traceback refers to this frame
            del error

    def _send(self, call: Call, message: object) -> None:
        try:
            self._link.send(message, wait=not self._due)
        except self._link.gone as why:
            in_work = self._due[0] if self._due else None
            died = self._died(why)
            if in_work is None:
                raise died from None
            in_work.outcome = None, died
        else:
            self._due.append(call)
            call.sent = True

    def _take_answer(self, timeout_s: float | None) -> None:
        """Wait for the answer to the oldest call."""
        call = self._due[0]
        try:
            self._await(timeout_s)
            result = self._receive()
        except Unreadable as bad:
            bad.error.add_note(
                "pipegraph: what the function returned cannot be read in the trainer's process"
            )
            call.outcome = None, bad.error
        except Exception as error:
            call.outcome = None, error
        else:
            call.outcome = (None, result.error()) if isinstance(result, Carried) else (result, None)

    def _receive(self) -> object:
        """The next answer, which is there."""
        try:
            result, counts = self._link.receive()
        except self._link.gone as why:
            raise self._died(why) from None
        except Unreadable:
            raise
        except BaseException as error:
            if type(error) is OSError:  # no more files may be open
                raise self._cut_off(error) from error
            self._kill()  # Ctrl-C inside a message: its rest would be taken for the next one
            raise
        finally:
            if self._due:  # the child has not ended
                self._due.popleft()
        for name, n in counts.items():
            self._context.count(name, n)
        return result

    def _await(self, timeout_s: float | None) -> None:
        """Wait until there is an answer, or until a row passes its deadline."""
        left_s = math.inf if timeout_s is None else timeout_s
        without_s = 0.0
        while True:
            asked_ns = concurrency.monotonic_ns()
            if self._ready(left_s):
                return
            assert timeout_s is not None
            without_s += stopped_s((concurrency.monotonic_ns() - asked_ns) / 1e9, left_s)
            try:
                row, spent_s = self._link.look()
            except self._link.gone as why:
                raise self._died(why) from None
            left_s = timeout_s - spent_s + without_s
            if left_s <= 0:
                raise self._overdue(row)
            left_s = max(0.001, left_s)

    def _ready(self, left_s: float) -> bool:
        """Wait until there is an answer; returns whether it came in time."""
        if self._link.holds:
            return True
        try:
            found = [key.fd for key, _ in self._selector.select(None if left_s == math.inf else left_s)]
        except OSError as error:  # there is no memory for it
            raise self._cut_off(error) from error
        if self._wake.fileno() in found:
            raise Cancelled
        if self._link.answers in found:
            return True
        if found:
            raise self._died(None)
        return False

    # -- its end -------------------------------------------------------------------------------

    def _cut_off(self, error: OSError) -> Died:
        """The trainer cannot receive what the child sends: it is ended, and has died to those who call."""
        self._kill()
        return Died(f"was ended, for what it sends cannot be received: {error}", NOTHING, "")

    def _died(self, why: Exception | None) -> Died:
        try:
            died = self._link.died(why)
        finally:
            self._forget()
        self.deaths += 1
        return died

    def _overdue(self, row: int) -> Overdue:
        try:
            return self._link.overdue(row)
        finally:
            self._forget()

    def _kill(self) -> None:
        if self._running is not None:
            try:
                self._running.kill()
            finally:
                self._forget()

    def _forget(self) -> None:
        """There is no child any more; a later call starts another."""
        self._running = None
        self.ended += 1
        for call in self._due:  # lost with the child
            call.sent = False
        self._due.clear()

    def cancel(self) -> None:
        """End a waiting call, and later ones until :meth:`uncancel`. Thread-safe."""
        self._wake.set()

    def uncancel(self) -> None:
        """Calls may wait again."""
        self._wake.clear()

    def close(self, grace_s: float = GRACE_S) -> None:
        """Close the operator there and end the child, by force after ``grace_s``; idempotent.

        Raises:
            Exception: the operator's ``close`` raised it there.
        """
        if not self._started:
            return
        error: BaseException | None = None
        try:
            if self._running is not None and grace_s:
                error = self._close_operator(grace_s)
        finally:
            self._kill()
            self._wake.close()
            self._started = False
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame

    def _close_operator(self, grace_s: float) -> BaseException | None:
        self._selector.unregister(self._wake.fileno())
        deadline = concurrency.monotonic() + grace_s
        result: object = None
        try:
            closing = False
            while self._due or not closing:
                if not self._due:
                    self._send(Call("close"), ("close", ()))
                    closing = True
                if not self._ready(max(0.0, deadline - concurrency.monotonic())):
                    return None  # it is in the middle of a long item, which is not needed: it is killed
                with suppress(Unreadable):
                    result = self._receive()
        except Died:
            return None  # it had died already
        return result.error() if isinstance(result, Carried) else None
