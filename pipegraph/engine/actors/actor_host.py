"""The host of one Ray actor, in the trainer: calls with deadlines, deaths, restarts and shutdown.

The behaviour contract is that of ``process.process_host``, with these differences (what differs from both is a bug):

* Ray reports the end of an actor, or of its node; an answer that was lost with the node's memory counts as its end.
* The row in work is not known when the process is gone, and its memory too. So the next actor records each row that it
  begins in the cluster's key-value store, for its first ``NOTED_CALLS`` calls: a row that ends every process is found
  by that. Until then, such an end counts as one between two rows.
* Meanwhile it has one call at a time, so that a record belongs to the call that is waited for. Otherwise one more is
  sent ahead, which Ray begins when the previous one is done.
* An actor waits for its resources without limit; after ``PATIENCE_S`` the log says why.
* Once ``ray.shutdown()`` was called, every call raises ``Cancelled``: the run fails by the ``connection``.

Invariant: ``_condition`` guards what answers, cancellations and the calling thread share; Ray's thread only notifies.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray import exceptions as lost
from ray._private import state

from pipegraph import concurrency
from pipegraph.contracts import Context
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.actors.actor import StageActor
from pipegraph.engine.actors.connection import Connection
from pipegraph.engine.actors.notes import forget, noted
from pipegraph.engine.actors.parcel import Parcel, Received
from pipegraph.engine.actors.room import needs, why_it_waits
from pipegraph.engine.remote.contract import (
    GRACE_S,
    AheadState,
    Call,
    Died,
    HostState,
    Overdue,
    WorkerHost,
    moved,
    same_call,
)
from pipegraph.engine.remote.exceptions import Carried
from pipegraph.engine.remote.worker import NOTHING

log = logging.getLogger("pipegraph")

NOTED_CALLS = 8
"""Calls in which an actor records its rows if its predecessor died: one more than repeating a bundle takes."""

PATIENCE_S = 30.0
"""Seconds for an actor to start before the log says what it may be waiting for."""

NODE_DIED = "its node has died"
"""Ray's text for an actor that ended with its node. One that is starting then waits for another node."""

LOOK_S = 5.0
"""Seconds for an actor to report its stack; one whose code holds the GIL never does."""

_LOST = (
    lost.RayActorError,
    lost.ObjectLostError,
    lost.ObjectFetchTimedOutError,
    lost.WorkerCrashedError,
    lost.OutOfMemoryError,
    lost.NodeDiedError,
)


_Answer = tuple[int, "Future[Any]"]
"""The number of a call to the actor, and its answer."""


class ActorHost(WorkerHost):
    """See the module docstring. One thread calls; ``cancel`` may come from any.

    Args:
        options: of the actor, as Ray takes them.
        sealed: a reference to the parcel of the operators.
        contexts: with which the operators are opened; the first one's ``stopping`` cancels a start.
        given: further data for the actor: how the next ``Batch`` packs rows, and whether a stage has a policy.
        timeout_s: limit for one row; None: no limit.
        connection: to the cluster.
    """

    pid: int | None = None
    """It is no process of this machine."""
    _next: tuple[Call, _Answer]  # sent ahead, if there is one
    place = "actor"
    gave_up = "its actor was ended"

    def __init__(
        self,
        options: dict[str, Any],
        sealed: Any,
        contexts: Sequence[Context],
        given: tuple[Callable[[list[Any]], Any] | None, bool],
        timeout_s: float | None,
        connection: Connection,
    ) -> None:
        super().__init__(contexts[0])
        self._options = options
        self._connection = connection
        self._sealed = sealed
        self._contexts = contexts
        self._given = given
        self._timeout_s = timeout_s
        self._condition = concurrency.Condition()
        self._cancelled = False
        self._actor: Any = None
        self._sent = 0  # calls to this actor
        self._forget_ahead()
        self._left: _Answer | None = None  # the answer to the last call before a cancellation
        self._key = uuid.uuid4().bytes
        self._to_note = 0
        self._noting = False

    def _is_own(self, died: Died) -> bool:
        return NODE_DIED not in died.reason

    def _start(self) -> None:
        self._check_connected()
        self._actor = ray.remote(**self._options)(StageActor).remote(self._key)
        self._state = moved(self._state, HostState.SERVING)
        self._sent = 0
        opened = self._actor.start.remote(self._sealed, self._contexts, *self._given)
        try:
            self._result((0, opened.future()), opening=True)
        except Died:
            raise
        except BaseException:
            self._end()
            raise

    # -- calls ---------------------------------------------------------------------------------

    def call(self, name: str, *args: Any) -> Any:
        called = (name, *args)
        if self._ahead is AheadState.SENT and same_call(self._next[0], called):
            answer = self._next[1]
            self._forget_ahead()
        else:
            if self._left is not None:  # the actor is still in that call, perhaps for long
                with contextlib.suppress(Exception):
                    self._answer(self._left)
            if self._state is not HostState.SERVING:
                self.start()
            self._noting = self._to_note > 0
            self._to_note = max(0, self._to_note - 1)
            answer = self._send(called)
        self._look_ahead()
        return self._result(answer)

    def _check_connected(self) -> None:
        if not self._connection.alive:
            raise Cancelled

    def _send(self, called: Call) -> _Answer:
        parcel = Parcel((called[0], called[1:]))
        try:
            answer = self._actor.call.remote(self._noting, parcel).future()
        except Exception:
            self._check_connected()
            raise
        self._sent += 1
        return self._sent, answer

    def _look_ahead(self) -> None:
        if self._noting or self.ahead is None or (found := self.ahead()) is None:
            return
        with contextlib.suppress(Exception):  # the call itself will raise it
            self._next = found, self._send(found)
            self._ahead = moved(self._ahead, AheadState.SENT)

    def _forget_ahead(self) -> None:
        """The call sent ahead is called now, or never."""
        self._ahead = moved(self._ahead, AheadState.NONE)
        self._next = (), (0, Future())

    def _result(self, answer: _Answer, opening: bool = False) -> Any:
        result, counts = self._answer(answer, opening)
        for (member, name), n in counts.items():
            self._contexts[member].count(name, n)
        if result.__class__ is Carried:
            raise result.error()
        return result

    def _answer(self, numbered: _Answer, opening: bool = False) -> Any:
        self._left = numbered
        number, answer = numbered
        del numbered
        answer.add_done_callback(self._notify)
        if opening:
            if not self._await(answer, PATIENCE_S):
                self._say_what_is_waited_for()
                self._await(answer, None)
        elif not self._await(answer, self._timeout_s):
            self._await_rows(number, answer)
        self._left = None
        try:
            received: Received = answer.result()
        except _LOST as error:
            self._check_connected()
            raise self._died(error) from None
        del answer
        try:
            return received.open()
        except Exception as error:
            error.add_note("pipegraph: what the function returned cannot be read in the trainer's process")
            raise

    def _notify(self, answer: Future[Any]) -> None:
        with self._condition:
            self._condition.notify_all()

    def _await(self, answer: Future[Any], timeout_s: float | None) -> bool:
        """Wait for an answer; returns whether it came in time."""
        deadline = None if timeout_s is None else concurrency.monotonic() + timeout_s
        with self._condition:
            while not answer.done():
                if self._cancelled:
                    if self._ahead is AheadState.SENT:  # it will not be called any more
                        self._left = self._next[1]
                        self._forget_ahead()
                    raise Cancelled
                left_s = None if deadline is None else deadline - concurrency.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                self._condition.wait(left_s)
        return True

    def _await_rows(self, number: int, answer: Future[Any]) -> None:
        """Block until there is an answer to this call; raises if a row passes its deadline."""
        assert self._timeout_s is not None
        while True:
            look = self._actor.look.options(concurrency_group="look").remote().future()
            look.add_done_callback(self._notify)
            if not self._await(look, LOOK_S):
                if not self._noting:
                    raise self._died("did not say where it stands when its item took longer than it may")
                self._end()
                row, member = noted(self._key)
                raise Overdue(row, "(the code in work does not let Python say where)", member=member)
            try:
                at, row, spent_s, member, stack = look.result()
            except _LOST:
                self._await(answer, None)  # which says the same
                return
            if answer.done():
                return
            if at > number or row == NOTHING:  # the answer, or the call, is on its way
                spent_s = 0.0
            elif spent_s >= self._timeout_s:
                if at < number:  # its own deadline comes with its turn
                    raise self._died("was ended: what it had in work before took longer than it may")
                self._end()
                raise Overdue(row, stack, member=member)
            if self._await(answer, max(0.001, self._timeout_s - spent_s)):
                return

    def _died(self, error: Exception | str) -> Died:
        row, member = noted(self._key) if self._noting else (NOTHING, 0)
        self._end()
        self.deaths += 1
        self._to_note = NOTED_CALLS
        return Died(error if isinstance(error, str) else _reason(error), row, "", member)

    def _end(self) -> None:
        actor, self._actor, self._left = self._actor, None, None
        self._forget_ahead()
        self._state = moved(self._state, HostState.ABSENT)
        if actor is not None and self._connection.alive:
            with contextlib.suppress(Exception):
                ray.kill(actor)

    def _say_what_is_waited_for(self) -> None:
        with contextlib.suppress(Exception):
            running = bool(state.actors(self._actor._actor_id.hex())["Pid"])
            free = list(state.available_resources_per_node().values())
            whole = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            log.warning(
                "stage %r: the Ray actor of worker %d %s",
                *(self._context.stage, self._context.worker),
                why_it_waits(needs(self._options), running, free, whole),
            )

    # -- closing -------------------------------------------------------------------------------

    def cancel(self) -> None:
        self._set_cancelled(True)

    def uncancel(self) -> None:
        self._set_cancelled(False)

    def _set_cancelled(self, cancelled: bool) -> None:
        with self._condition:
            self._cancelled = cancelled
            self._condition.notify_all()

    def close(self, grace_s: float = GRACE_S) -> None:
        """End the actor; idempotent.

        Raises:
            Exception: what the operator's ``close`` raised there.
        """
        if self._state is not HostState.SERVING:
            return
        self.uncancel()
        error = None
        try:
            if grace_s and self._connection.alive:
                error = self._close_operator(grace_s)
        finally:
            if self.deaths and self._connection.alive:
                forget(self._key)
            self._end()
            self._state = HostState.CLOSED
        if error is not None:
            raise error

    def _close_operator(self, grace_s: float) -> BaseException | None:
        answer = self._actor.call.remote(False, Parcel(("close", ()))).future()
        answer.add_done_callback(self._notify)
        if not self._await(answer, grace_s):
            return None  # it is in the middle of a long item, which is not needed: it is killed
        with contextlib.suppress(lost.RayError):
            result, _ = answer.result().open()
            return result.error() if isinstance(result, Carried) else None
        return None


def _reason(error: Exception) -> str:
    """Ray's reason for the end of an actor, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [
        line for line in lines if line.startswith(("The actor is dead because", "The actor died because"))
    ]
    return f"has died: {(reasons or lines or [type(error).__name__])[0].partition(' Some common causes')[0]}"
