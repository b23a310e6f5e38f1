"""The host of one Ray actor, in the trainer: calls with deadlines, deaths, restarts and shutdown.

The behaviour contract is that of ``host``, with these differences (what differs from both is a bug):

* Ray reports the end of an actor, or of its node; an answer that was lost with the node's memory counts as its end.
* The row in work is not known when the process is gone, and its memory too. So the next actor records each row that it
  begins in the cluster's key-value store, for its first ``NOTED_CALLS`` calls: a row that ends every process is found
  by that. Until then, such an end counts as one between two rows.
* Meanwhile it has one call at a time, so that a record belongs to the call that is waited for. Otherwise one more is
  sent ahead, which Ray begins when the previous one is done.
* An actor waits for its resources without limit; after ``PATIENCE_S`` the log says what it needs.
* Once ``ray.shutdown()`` was called, every call raises ``Cancelled``: the run fails by the ``connection``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import wait
from typing import Any

import ray
from ray import exceptions as lost
from ray._private.worker import global_worker

from pipegraph.contracts import Context
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.actors.actor import StageActor, forget, noted
from pipegraph.engine.actors.cluster import NAMED
from pipegraph.engine.actors.parcel import Parcel, Received
from pipegraph.engine.remote.contract import GRACE_S, NOTHING, Call, Died, Flag, Link, Overdue, Unreadable
from pipegraph.engine.remote.host import Host

log = logging.getLogger("pipegraph")

NOTED_CALLS = 8
"""Calls in which an actor records its rows if its predecessor died: one more than repeating a bundle takes."""

PATIENCE_S = 30.0
"""Seconds for an actor to start before the log says what it needs."""

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


class Connection:
    """This process's connection to its cluster, whose end no actor can report: ``ray.shutdown()`` drops all answers.

    Args:
        lost: called once, when ``ray.shutdown()`` has ended it, by the thread that does so or by the one that notices.
    """

    def __init__(self, lost: Callable[[], None]) -> None:
        # Ray has no hook for its end, but drops this object at that moment.
        self._end = weakref.finalize(global_worker.function_actor_manager, lost)
        self._end.atexit = False

    @property
    def alive(self) -> bool:
        """Whether Ray can be called; if not, it would start another cluster."""
        if not ray.is_initialized():
            self._end()
        return self._end.alive

    def leave(self) -> None:
        """Notice its end no more."""
        self._end.detach()


class _SilentError(Exception):
    """The actor did not say where it stands."""


class ActorLink(Link):
    """A running actor.

    Args:
        options: as Ray takes them.
        noting: whether it records its first rows.
        wake: a descriptor that ends a wait.
    """

    gone = (*_LOST, _SilentError)

    def __init__(self, options: dict[str, object], noting: bool, connection: Connection, wake: int) -> None:
        self._key = uuid.uuid4().bytes  # of its records
        self.actor = ray.remote(**options)(StageActor).remote(self._key)
        self._noting = noting
        self._to_note = NOTED_CALLS if noting else 0
        self._connection = connection
        self._wake = wake
        self._due: deque[Future[Any]] = deque()
        self._received = -1  # number of the last call that was answered; that which opens the operators is 0
        self._first = Flag()  # set when the first one due is there
        self._first.open()
        self.answers = self._first.fileno()
        self._stack = ""

    def send(self, message: Any, wait: bool = True) -> None:
        self._check_connected()  # without a cluster Ray would start one for this call
        opening = self._received < 0 and not self._due
        self.alone = not opening and self._to_note > 0
        self._to_note -= self.alone
        try:
            if opening:
                answer = self.actor.start.remote(*message).future()
            else:
                answer = self.actor.call.remote(self.alone, Parcel(message)).future()
        except Exception:
            self._check_connected()
            raise
        self._due.append(answer)
        if len(self._due) == 1:
            answer.add_done_callback(self._notify)

    def _notify(self, answer: object) -> None:
        self._first.set()

    def receive(self) -> Any:
        answer = self._due.popleft()
        self._first.clear()
        if self._due:
            self._due[0].add_done_callback(self._notify)
        self._received += 1
        received: Received = answer.result()
        del answer
        try:
            return received.open()
        except Exception as error:
            raise Unreadable(error) from error

    def _check_connected(self) -> None:
        if not self._connection.alive:
            raise Cancelled

    def look(self) -> tuple[int, float]:
        due = self._due[0]
        asked = self.actor.look.options(concurrency_group="look").remote().future()
        with contextlib.closing(Flag()) as said:
            said.open()
            asked.add_done_callback(lambda _: said.set())
            if not wait([said.fileno(), self.answers, self._wake], LOOK_S):
                if not self.alone:
                    raise _SilentError
                self._stack = "(the code in work does not let Python say where)"
                return noted(self._key), math.inf
        nothing = NOTHING, 0.0
        if not asked.done() or asked.exception() is not None:  # the answer comes first, or says the same
            return nothing
        at, row, spent_s, self._stack = asked.result()
        if due.done() or at != self._received + 1 or row == NOTHING:  # the answer, or the call, is on its way
            return nothing
        return row, spent_s

    def overdue(self, row: int) -> Overdue:
        self.kill()
        return Overdue(row, self._stack)

    def died(self, why: Exception | None) -> Died:
        self._check_connected()
        row = noted(self._key) if self.alone else NOTHING
        self.kill()
        return Died(_reason(why), row, "")

    def kill(self) -> None:
        self._first.close()
        if self._connection.alive:
            with contextlib.suppress(Exception):
                ray.kill(self.actor)
            if self._noting:
                forget(self._key)


class ActorHost(Host):
    """Starts actors; see the module docstring.

    Args:
        options: of the actor, as Ray takes them.
        connection: to the cluster.
    """

    place = "actor"
    gave_up = "its actor was ended"

    def __init__(
        self,
        options: dict[str, object],
        context: Context,
        opening: object,
        timeout_s: float | None,
        connection: Connection,
    ) -> None:
        super().__init__(context, opening, timeout_s)
        self._options = options
        self._connection = connection

    def _is_own(self, died: Died) -> bool:
        return NODE_DIED not in died.reason

    def _live(self, wake: int) -> ActorLink:
        if not self._connection.alive:
            raise Cancelled
        return ActorLink(self._options, self.deaths > 0, self._connection, wake)

    def _opened(self, opening: Call) -> None:
        if not self._ready(PATIENCE_S):
            self._say_what_is_waited_for()
        super()._opened(opening)

    def _say_what_is_waited_for(self) -> None:
        with contextlib.suppress(Exception):
            log.warning(
                "stage %r: the Ray actor of worker %d has not started in %g s: it needs num_cpus=%s, num_gpus=%s, "
                "memory=%s and %s of one node; all nodes together have left %s. It starts when a node has room: fewer "
                "workers= or smaller resources= help; `ray status` lists the nodes",
                *(self._context.stage, self._context.worker, PATIENCE_S),
                *(self._options.get(each, 0) for each in NAMED),
                self._options["resources"],
                ray.available_resources(),
            )

    def close(self, grace_s: float = GRACE_S) -> None:
        connected = self._running is None or self._connection.alive
        super().close(grace_s if connected else 0)


def _reason(error: Exception | None) -> str:
    """Ray's reason for the end of an actor, in one line."""
    if isinstance(error, _SilentError):
        return "did not say where it stands when its item took longer than it may"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [
        line for line in lines if line.startswith(("The actor is dead because", "The actor died because"))
    ]
    return f"has died: {(reasons or lines or [type(error).__name__])[0].partition(' Some common causes')[0]}"
