"""The scheduler: it hands one baton from task to task. A task is a real thread that runs only while it has the baton.

Every operation of the controlled primitives (``primitives``) is a switch point: the strategy says which task runs on.
A task that waits is blocked until another makes it ready; if all wait, the virtual clock moves to the earliest
deadline; if there is none, that is a deadlock, which is a finding.

Nothing here needs a lock: only the task with the baton runs.
"""

from __future__ import annotations

import _thread
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from scheduler.lines import LineTracer

REAL_GRACE_S = 10.0
"""Seconds of real time in which a thread that was told to end must end, and a step must be over."""


class Deadlock(AssertionError):
    """All tasks wait, and none has a deadline."""


class Hung(AssertionError):
    """The steps of a schedule exceed their bound."""


class Abandoned(BaseException):
    """Unwinds a task's stack after the schedule has failed. Never reaches a model."""


class Task:
    """One thread of a schedule.

    Attributes:
        blocked_on: what it waits for; None if it can run.
        deadline_s: the virtual time at which its wait ends by itself.
        timed_out: whether its last wait ended so.
        pending: an exception to raise in it at its next step.
    """

    __slots__ = (
        *("baton", "blocked_on", "deadline_s", "done", "error", "ident", "joiners", "name", "number"),
        *("pending", "timed_out", "guarded"),
    )  # fmt: skip

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.ident = 0
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.blocked_on: Any = None
        self.deadline_s: float | None = None
        self.timed_out = False
        self.done = False
        self.error: BaseException | None = None
        self.joiners: list[Task] = []
        self.pending: BaseException | None = None
        self.guarded = 0  # above 0: no fault is raised here now

    def __repr__(self) -> str:
        return f"<{self.number} {self.name}>"


class Strategy(Protocol):
    """Chooses the order of a schedule."""

    def choose(self, ready: list[Task], current: Task | None) -> Task:
        """The task that runs next; ``current`` is the one that runs now, if it can go on."""
        ...


class Scheduler:
    """See the module docstring.

    Args:
        max_steps: switch points after which the schedule counts as hung.
        tick_s: virtual seconds that each look at the clock takes.
        seen: gets the place of every switch point, if given: ``(file, line)``.
        lines: ends of the paths of files of which every line is a switch point; such schedules take far longer.

    Attributes:
        choices: the numbers of the tasks chosen, where there was a choice.
        steps: switch points so far.
        watch: called at every switch point of every task with the task; faults and checks of a model go here.
    """

    def __init__(
        self,
        strategy: Strategy,
        max_steps: int = 50_000,
        tick_s: float = 1e-6,
        seen: set[tuple[str, int]] | None = None,
        lines: tuple[str, ...] = (),
    ) -> None:
        self.strategy = strategy
        self.max_steps = max_steps
        self.tick_s = tick_s
        self.seen = seen
        self.now_s = 1000.0
        self.tasks: list[Task] = []
        self.ready: list[Task] = []
        self.current: Task | None = None
        self.choices: list[int] = []
        self.steps = 0
        self.failure: BaseException | None = None
        self.stacks = ""
        self.watch: Callable[[Task], None] | None = None
        self._threads: list[threading.Thread] = []
        self._trace = LineTracer(lines, self._line).trace if lines else None

    # -- tasks ---------------------------------------------------------------------------------

    def run(self, model: Callable[[], Any]) -> Any:
        """Run ``model`` in the calling thread, as the first task, then all tasks that it has begun, to their end.

        Raises:
            Deadlock, Hung: with every task's stack.
            BaseException: what the model raised, or what ended another task.
        """
        main = self._add("main")
        main.ident = threading.get_ident()
        self.current = main
        result = None
        try:
            if self._trace is not None:
                sys.settrace(self._trace)
            result = model()
            self.join_all()
        except Abandoned:
            pass
        except BaseException as error:
            if self.failure is None:
                self.failure = error
        finally:
            if self._trace is not None:
                sys.settrace(None)
            self.abandon()
        if self.failure is not None:
            raise self.failure
        return result

    def join_all(self) -> None:
        """Let the other tasks run to their end."""
        for task in self.tasks:
            while not task.done and task is not self.current:
                task.joiners.append(self.require())
                self.block(("end of", task))

    def begin(self, name: str, thread: threading.Thread) -> Task:
        """A task for a thread that the caller starts now; it runs on when the strategy says so."""
        task = self._add(name)
        self.ready.append(task)
        self._threads.append(thread)
        return task

    def _add(self, name: str) -> Task:
        task = Task(len(self.tasks), name)
        self.tasks.append(task)
        if len(self.tasks) == 1:
            self.ready.append(task)
        return task

    def body(self, task: Task, body: Callable[[], Any]) -> None:
        """The life of a task's thread: wait for the baton, then run."""
        task.ident = threading.get_ident()
        task.baton.acquire()
        try:
            if self.failure is None:
                if self._trace is not None:
                    sys.settrace(self._trace)
                body()
        except Abandoned:
            pass
        except BaseException as error:
            task.error = error
            if self.failure is None:
                self.failure = error
        finally:
            sys.settrace(None)
            self._end(task)

    def _end(self, task: Task) -> None:
        task.done = True
        if task in self.ready:
            self.ready.remove(task)
        for joiner in task.joiners:
            self.wake(joiner)
        if self.failure is not None:
            self._to_main()
        else:
            following = self._next(None)
            if following is not None:
                self.current = following
                following.baton.release()

    # -- switch points -------------------------------------------------------------------------

    def require(self) -> Task:
        """The calling task."""
        task = self.current
        assert task is not None
        return task

    def controls(self) -> bool:
        """Whether the calling thread is the task that runs now."""
        task = self.current
        return task is not None and task.ident == _thread.get_ident()

    def point(self) -> None:
        """A switch point: another task may run here. Raises a fault that was laid for the calling task."""
        task = self.current
        if task is None or self.failure is not None:
            if task is not None and not task.guarded:
                raise Abandoned
            return
        self.steps += 1
        if self.seen is not None:
            self._note_place()
        if self.steps > self.max_steps:
            self._fail(Hung(f"more than {self.max_steps} switch points"))
        if self.watch is not None:
            self.watch(task)
        if len(self.ready) > 1:
            chosen = self.strategy.choose(self.ready, task)
            self.choices.append(chosen.number)
            if chosen is not task:
                self._switch(task, chosen)
        if task.pending is not None and not task.guarded:
            self._raise_pending(task)

    def _line(self, faults: bool) -> None:
        """A line of a traced module."""
        task = self.current
        if task is None or task.ident != _thread.get_ident() or self.failure is not None:
            return
        task.guarded += not faults
        try:
            self.point()
        finally:
            task.guarded -= not faults

    def block(self, on: Any, timeout_s: float | None = None) -> bool:
        """Wait until :meth:`wake`, at most for ``timeout_s`` virtual seconds. False if they are over."""
        task = self.require()
        if self.failure is not None:
            raise Abandoned
        if task.pending is not None and not task.guarded:
            self._raise_pending(task)
        task.blocked_on = on
        task.timed_out = False
        task.deadline_s = None if timeout_s is None else self.now_s + max(0.0, timeout_s)
        self.ready.remove(task)
        self.steps += 1
        chosen = self._next(task)
        if chosen is not task:
            if chosen is None:
                raise Abandoned
            self._switch(task, chosen)
        if task.pending is not None and not task.guarded:
            self._raise_pending(task)
        return not task.timed_out

    def wake(self, task: Task) -> None:
        """Make a blocked task ready; one that is ready or has ended stays so."""
        if task.blocked_on is not None and not task.done:
            task.blocked_on = task.deadline_s = None
            self.ready.append(task)

    def interrupt(self, task: Task, error: BaseException) -> None:
        """Raise ``error`` in a task at its next step; a wait ends for it, as a signal ends one in the main thread."""
        task.pending = error
        self.wake(task)

    def _raise_pending(self, task: Task) -> None:
        error, task.pending = task.pending, None
        assert error is not None
        try:
            raise error
        finally:
            del error  # else its traceback would keep it alive, and with it what the interrupted thread held

    def _next(self, current: Task | None) -> Task | None:
        """The task that runs after ``current`` has blocked or ended; None after a failure that this finds."""
        if not self.ready:
            timed = [task for task in self.tasks if task.deadline_s is not None]
            if not timed:
                if current is None and all(task.done for task in self.tasks):
                    return None
                self._note_failure(Deadlock("all tasks wait"))
                if current is not None and current.number == 0:
                    return None
                return self._main_again()
            first = min(timed, key=lambda task: (task.deadline_s, task.number))
            assert first.deadline_s is not None
            self.now_s = max(self.now_s, first.deadline_s)
            first.blocked_on, first.deadline_s, first.timed_out = first, None, True
            self.wake(first)
        if len(self.ready) == 1:
            return self.ready[0]
        chosen = self.strategy.choose(self.ready, None)
        self.choices.append(chosen.number)
        return chosen

    def _switch(self, task: Task, chosen: Task) -> None:
        self.current = chosen
        chosen.baton.release()
        task.baton.acquire()
        if self.failure is not None and not task.guarded:
            raise Abandoned

    # -- failing -------------------------------------------------------------------------------

    def _note_failure(self, error: BaseException) -> None:
        if self.failure is None:
            self.stacks = self.dump()
            error.args = (f"{error.args[0]}:\n{self.stacks}",)
            self.failure = error

    def _fail(self, error: BaseException) -> None:
        self._note_failure(error)
        raise Abandoned

    def _main_again(self) -> Task:
        main = self.tasks[0]
        main.blocked_on = main.deadline_s = None
        if main not in self.ready:
            self.ready.append(main)
        return main

    def _to_main(self) -> None:
        main = self._main_again()
        self.current = main
        main.baton.release()

    def abandon(self) -> None:
        """Unwind every task that is left, one after the other; called by the first task at the very end."""
        left = [task for task in self.tasks[1:] if not task.done]
        if left and self.failure is None:
            self.failure = AssertionError("tasks are left")
        for task in left:
            while not task.done:
                self.current = task
                task.blocked_on = None
                main = self.tasks[0]
                task.baton.release()
                if not main.baton.acquire(timeout=REAL_GRACE_S):
                    raise RuntimeError(f"task {task} does not unwind:\n{self.dump()}")
        self.current = None
        for thread in self._threads:
            threading.Thread.join(thread, REAL_GRACE_S)

    def dump(self) -> str:
        """Every task's state and stack."""
        frames = sys._current_frames()
        lines = []
        for task in self.tasks:
            if task.done:
                continue
            state = "ready" if task.blocked_on is None else f"waits for {task.blocked_on!r}"
            frame = frames.get(task.ident)
            lines.append(f"-- {task}: {state}\n{_stack(frame)}")
        return "\n".join(lines)

    def _note_place(self) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and "/support/scheduler/" in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None and self.seen is not None:
            self.seen.add((frame.f_code.co_filename, frame.f_lineno))


def _stack(frame: FrameType | None) -> str:
    if frame is None:
        return "   (not begun)"
    kept = [
        entry
        for entry in traceback.extract_stack(frame)
        if "/support/scheduler/" not in entry.filename and "/_pytest/" not in entry.filename
    ]
    return "".join(traceback.format_list(kept[-12:]))
