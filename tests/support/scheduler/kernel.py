"""The scheduler: of a schedule's tasks one runs at a time, and it says which. A task is a greenlet, which a switch to
costs less than a microsecond; or a real thread, for models that need one (``vehicles``).

Every operation of the controlled primitives (``primitives``, ``threads``) is a switch point: the strategy says which task runs on.
A task that waits is blocked until another makes it ready; if all wait, the virtual clock moves to the earliest
deadline; if there is none, that is a deadlock, which is a finding.

Most switch points switch nothing, so they only count; the strategy says in advance at which step it decides again.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any, Protocol

from scheduler.vehicles import Greenlet, Vehicle

NEVER = sys.maxsize


class Deadlock(AssertionError):
    """All tasks wait, and none has a deadline."""


class Hung(AssertionError):
    """The steps of a schedule exceed their bound."""


class CtrlC(KeyboardInterrupt):
    """A Ctrl-C of the schedule; one that the user types ends the exploration."""


class Abandoned(BaseException):
    """Unwinds a task's stack after the schedule has failed. Never reaches a model."""


class Task:
    """What is a thread in production.

    Attributes:
        thread: the ``threads.Thread``; None for the first task.
        blocked_on: what it waits for; None if it can run.
        deadline_s: the virtual time at which its wait ends by itself.
        timed_out: whether its last wait ended so.
        pending: an exception to raise in it at its next step.
        guarded: above 0, no fault is raised in it now.
        locals: what it has in each ``threads.local``.
    """

    __slots__ = (
        *("blocked_on", "deadline_s", "done", "guarded", "joiners", "locals", "name", "number"),
        *("pending", "thread", "timed_out", "vehicle"),
    )  # fmt: skip

    def __init__(self, number: int, name: str, thread: Any) -> None:
        self.number = number
        self.name = name
        self.thread = thread
        self.vehicle: Any = None
        self.blocked_on: Any = None
        self.deadline_s: float | None = None
        self.timed_out = False
        self.done = False
        self.joiners: list[Task] = []
        self.pending: BaseException | None = None
        self.guarded = 0
        self.locals: dict[Any, dict[str, Any]] = {}

    def __repr__(self) -> str:
        return f"<{self.number} {self.name}>"


class Strategy(Protocol):
    """Chooses the order of a schedule.

    Attributes:
        at: the step of its next decision.
        follows_ready: whether it decides anew whenever a task becomes ready.
    """

    name: str
    at: int
    follows_ready: bool

    def choose(self, ready: list[Task], current: Task | None, step: int) -> Task:
        """The task that runs next; ``current`` is the one that runs now, if it can go on."""
        ...


class Scheduler:
    """See the module docstring.

    Args:
        max_steps: switch points after which the schedule counts as hung.

    Attributes:
        seen: gets the place of every switch point, if it is a set: ``(code, offset)``.
        choices: of each switch the step and the number of the task that was chosen, one after the other.
        steps: switch points so far.
        look_at: the step of the next switch point that does more than count.
    """

    def __init__(
        self,
        strategy: Strategy,
        max_steps: int = 50_000,
        vehicle: type[Vehicle] = Greenlet,
    ) -> None:
        self.strategy = strategy
        self.max_steps = max_steps
        self.seen: set[tuple[CodeType, int]] | None = None
        self.now_s = 1000.0
        self.tasks: list[Task] = []
        self.ready: list[Task] = []
        self.current: Task | None = None
        self.choices: list[int] = []
        self.steps = 0
        self.failure: BaseException | None = None
        self._vehicle = vehicle
        self.look_at = 0
        self._alarm_at = NEVER
        self._alarm: Callable[[], None] = lambda: None

    # -- tasks ---------------------------------------------------------------------------------

    def run(self, model: Callable[[], Any]) -> Any:
        """Run ``model`` in the calling thread, as the first task, then all tasks that it has begun, to their end.

        Raises:
            Deadlock, Hung: with every task's stack.
            BaseException: what the model raised, or what ended another task.
        """
        main = self._add("main", None)
        main.vehicle = self._vehicle.current()
        self.current = main
        self.ready.append(main)
        result = None
        try:
            result = model()
            self.join_all()
        except Abandoned:
            pass
        except BaseException as error:
            self._failed(error)
        finally:
            self._abandon()
        if self.failure is not None:
            raise self.failure
        return result

    def join_all(self) -> None:
        """Let the other tasks run to their end."""
        for task in self.tasks:
            while not task.done and task is not self.current:
                task.joiners.append(self.require())
                self.block(("end of", task))

    def begin(self, name: str, thread: Any, body: Callable[[], Any]) -> Task:
        """A task that runs ``body`` when the strategy says so."""
        task = self._add(name, thread)
        task.vehicle = self._vehicle(lambda *_: self._live(task, body), self.tasks[0].vehicle)
        self._is_ready(task)
        return task

    def _add(self, name: str, thread: Any) -> Task:
        task = Task(len(self.tasks), name, thread)
        self.tasks.append(task)
        return task

    def _live(self, task: Task, body: Callable[[], Any]) -> None:
        """The life of a task."""
        try:
            if self.failure is None:
                body()
        except Abandoned:
            pass
        except BaseException as error:
            self._failed(error)
        task.done = True
        task.locals.clear()
        if task in self.ready:
            self.ready.remove(task)
        for joiner in task.joiners:
            self.wake(joiner)
        following = self._next(None) if self.failure is None else self._main_again()
        self.current = following
        task.vehicle.parent = following.vehicle  # runs on as this ends

    # -- switch points -------------------------------------------------------------------------

    def require(self) -> Task:
        """The calling task."""
        task = self.current
        assert task is not None
        return task

    def point(self) -> None:
        """A switch point: another task may run here. Raises a fault that was laid for the calling task.

        Once the schedule is over it does nothing: objects that were made in it can still be used.
        """
        self.steps += 1
        if self.steps >= self.look_at:
            self.look()

    def look(self) -> None:
        """The rest of a switch point, at step ``look_at``."""
        task = self.current
        if task is None:
            return
        if self.failure is not None:
            if not task.guarded:
                raise Abandoned
            return
        step, strategy = self.steps, self.strategy
        if self.seen is not None:
            self._note_place(self.seen)
        if step > self.max_steps:
            self._note_failure(Hung(f"more than {self.max_steps} switch points"))
            raise Abandoned
        if step >= self._alarm_at:
            self._alarm_at = NEVER
            self._alarm()
        if step >= strategy.at:
            chosen = strategy.choose(self.ready, task, step)
            if chosen is not task:
                self.choices += step, chosen.number
                self._switch(task, chosen)
        at = strategy.at
        if at > self._alarm_at:
            at = self._alarm_at
        self.look_at = 0 if self.seen is not None else at if at <= self.max_steps else self.max_steps + 1
        if task.pending is not None:
            self._resumed(task)

    def block(self, on: Any, timeout_s: float | None = None) -> bool:
        """Wait until :meth:`wake`, at most for ``timeout_s`` virtual seconds. False if they are over."""
        task = self.require()
        if self.failure is not None:
            raise Abandoned
        if task.pending is not None:
            self._resumed(task)
        task.blocked_on = on
        task.timed_out = False
        task.deadline_s = None if timeout_s is None else self.now_s + max(0.0, timeout_s)
        self.ready.remove(task)
        chosen = self._next(task)
        if chosen is not task:
            self._switch(task, chosen)
        elif self.failure is not None:
            raise Abandoned
        if task.pending is not None:
            self._resumed(task)
        return not task.timed_out

    def wake(self, task: Task) -> None:
        """Make a blocked task ready; one that is ready or has ended stays so."""
        if task.blocked_on is not None and not task.done:
            task.blocked_on = task.deadline_s = None
            self._is_ready(task)

    def _is_ready(self, task: Task) -> None:
        self.ready.append(task)
        if self.strategy.follows_ready:
            self.strategy.at = self.look_at = 0

    def alarm(self, after: int | None, alarm: Callable[[], None] = lambda: None) -> None:
        """Call ``alarm`` at a switch point of any task after so many others; None: not any more."""
        self._alarm_at = NEVER if after is None else self.steps + after + 1
        self._alarm = alarm
        self.look_at = 0

    def interrupt(self, task: Task, error: BaseException) -> None:
        """Raise ``error`` in a task at its next step; a wait ends for it, as a signal ends one in the main thread."""
        task.pending = error
        self.wake(task)

    def _resumed(self, task: Task) -> None:
        """Raise the fault that was laid for a task which runs; where it is guarded, as soon as it is not."""
        if task.guarded:
            self.look_at = 0
            return
        error, task.pending = task.pending, None
        try:
            raise error
        finally:
            del error  # else its traceback would keep it alive, and with it what the interrupted thread held

    def _next(self, current: Task | None) -> Task:
        """The task that runs after ``current`` has blocked, or one has ended; the first task after a failure that this
        finds."""
        if not self.ready:
            timed = [task for task in self.tasks if task.deadline_s is not None]
            if not timed:
                self._note_failure(Deadlock("all tasks wait"))
                return self._main_again()
            first = min(timed, key=lambda task: (task.deadline_s, task.number))
            assert first.deadline_s is not None
            self.now_s = max(self.now_s, first.deadline_s)
            first.timed_out = True
            self.wake(first)
        self.steps += 1
        if len(self.ready) == 1:
            return self.ready[0]
        chosen = self.strategy.choose(self.ready, None, self.steps)
        self.choices += self.steps, chosen.number
        return chosen

    def _switch(self, task: Task, chosen: Task) -> None:
        self.current = chosen
        chosen.vehicle.switch()
        if self.failure is not None and not task.guarded:
            raise Abandoned

    # -- failing -------------------------------------------------------------------------------

    def _failed(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self.look_at = 0

    def _note_failure(self, error: BaseException) -> None:
        if self.failure is None:
            error.args = (f"{error.args[0]}:\n{self.dump()}",)
            self._failed(error)

    def _main_again(self) -> Task:
        main = self.tasks[0]
        main.blocked_on = main.deadline_s = None
        if main not in self.ready:
            self.ready.append(main)
        return main

    def _abandon(self) -> None:
        """Unwind every task that is left, one after the other; called by the first task at the very end."""
        for task in self.tasks[1:]:
            if not task.done:
                self._failed(AssertionError("tasks are left"))
                self.current = task
                task.blocked_on = None
                task.vehicle.switch()
        self.current = None
        self.look_at = 0
        self._vehicle.ended([task.vehicle for task in self.tasks])

    def dump(self) -> str:
        """Every task's state and stack."""
        lines = []
        for task in self.tasks:
            if not task.done:
                state = "ready" if task.blocked_on is None else f"waits for {task.blocked_on!r}"
                frame = sys._getframe() if task is self.current else task.vehicle.gr_frame
                lines.append(f"-- {task}: {state}\n{_stack(frame)}")
        return "\n".join(lines)

    def _note_place(self, seen: set[tuple[CodeType, int]]) -> None:
        frame = sys._getframe(2)
        while _is_ours(frame.f_code):
            assert frame.f_back is not None
            frame = frame.f_back
        seen.add((frame.f_code, frame.f_lasti))


@cache
def _is_ours(code: CodeType) -> bool:
    return "/support/scheduler/" in code.co_filename


def _stack(frame: FrameType | None) -> str:
    if frame is None:
        return "   (not begun)\n"
    kept = [
        entry
        for entry in traceback.extract_stack(frame)
        if "/support/scheduler/" not in entry.filename and "/_pytest/" not in entry.filename
    ]
    return "".join(traceback.format_list(kept[-12:]))
