"""Worker processes as tasks of the schedule: messages are pickled, deaths are drawn.

What real processes add (forks, sockets, shared memory, signals) has tests of its own; here it is the trainer's side that
is explored: tickets, calls sent ahead, cancels, answers that nobody waits for, rows that were lost with a process.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import pipegraph as pg
from pipegraph import concurrency, operators as ops
from pipegraph.contracts import Context
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.process import processes
from pipegraph.engine.remote.contract import Call, Died
from pipegraph.engine.remote.exceptions import Carried
from pipegraph.engine.remote.pool import Pool
from pipegraph.engine.remote.worker import NOTHING, ProcessWorker
from schedule_models.pipelines import LoaderModel, add_one, mapped, triple


class Link:
    """Questions to a task, and its answers, as over a socket: whoever waits can be cancelled, the answer comes anyway."""

    def __init__(self, serve: Callable[[Any], Any], name: str) -> None:
        self._questions = concurrency.SimpleQueue()
        self._changed = concurrency.Condition()
        self._answers: list[bytes] = []
        self._dead = self._cancelled = False
        self._serve = serve
        self._unanswered = 0
        self.thread = concurrency.Thread(target=self._live, name=name)
        self.thread.start()

    def _live(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                answer = self._serve(pickle.loads(question))
            except Died:
                break
            except BaseException as error:
                answer = Carried(error)
            with self._changed:
                self._answers.append(pickle.dumps(answer))
                self._changed.notify_all()
        with self._changed:
            self._dead = True
            self._changed.notify_all()

    def ask(self, question: Any) -> Any:
        """The answer to a question; earlier ones that were cancelled are answered before."""
        self.request(question)
        while self._unanswered > 1:
            self._next_answer()
        return self.answer()

    def request(self, question: Any) -> None:
        self._questions.put(pickle.dumps(question))
        self._unanswered += 1

    def answer(self) -> Any:
        answer = self._next_answer()
        if isinstance(answer, Carried):
            raise answer.error()
        return answer

    def _next_answer(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self._dead or self._cancelled)
            if self._cancelled:
                raise Cancelled
            if not self._answers:
                raise Died("was killed", NOTHING, "")
            self._unanswered -= 1
            return pickle.loads(self._answers.pop(0))

    def cancel(self) -> None:
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def uncancel(self) -> None:
        with self._changed:
            self._cancelled = False

    def end(self) -> None:
        self._questions.put(None)
        self.thread.join()


class Page:
    """The row in work; a death is drawn as a row begins."""

    def __init__(self, dies: Callable[[], bool]) -> None:
        self.row = NOTHING
        self.killed = False
        self._dies = dies

    def begin(self, row: int) -> None:
        if not self.killed:
            self.row = row
            self.killed = self._dies()
        if self.killed:
            raise _KilledError


class _KilledError(BaseException):
    """The end of a fake process."""


class FakeHost:
    """The host of a worker whose process is a task."""

    place, gave_up = "process", "its process was ended"

    def __init__(self, sent: bytes, context: Context, pack: Any, dies: Callable[[], bool]) -> None:
        self._sent, self._context, self._pack = sent, context, pack
        self._dies = dies
        self._link: Link | None = None
        self._page = Page(dies)
        self._worker: ProcessWorker | None = None
        self._cancelled = False
        self.ended = 0

    @property
    def pid(self) -> int | None:
        return None

    def start(self) -> None:
        if self._context.stopping.is_set():
            raise Cancelled
        self._page = Page(self._dies)
        operator = pickle.loads(self._sent)
        self._worker = ProcessWorker(self._page, operator, self._context, self._pack)
        self._link = Link(self._serve, "process")

    def _serve(self, question: Any) -> Any:
        name, args = question
        try:
            result = getattr(self._worker, name)(*args)
        except _KilledError:
            result = None
        if self._page.killed:  # a killed process does not answer
            raise Died("was killed", self._page.row, "")
        return result

    def call(self, name: str, *args: Any) -> Any:
        if self._link is None:
            self.start()
        assert self._link is not None
        try:
            return self._link.ask((name, args))
        except Died:
            row = self._page.row
            self._link.end()
            self._link = None
            self.ended += 1
            raise Died("was killed", row, "") from None

    def begin(self, call: Call) -> None:
        """Sent when its answer is asked for."""

    ahead = begin

    def answer(self, call: Call) -> Any:
        return self.call(call.name, *call.args)

    def cancel(self) -> None:
        if self._link is not None:
            self._link.cancel()

    def uncancel(self) -> None:
        if self._link is not None:
            self._link.uncancel()

    def close(self, grace_s: float = 1.0) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.end()


class FakeProcesses(Pool):
    """In place of ``Processes``.

    Attributes:
        draw: says when a process dies; at most ``deaths`` of them do.
    """

    draw = random.Random(0)
    deaths = 0

    def __init__(self, plan: Any, fail: Any) -> None:
        super().__init__(plan)

    def _seal(self, operator: Any, stage: str) -> bytes:
        return pickle.dumps(operator)

    def _host(self, stage: Any, context: Context, sealed: bytes, opening: Any) -> Any:
        return FakeHost(sealed, context, self._packing(stage), self._dies)

    @classmethod
    def _dies(cls) -> bool:
        if cls.deaths and cls.draw.random() < 0.1:
            cls.deaths -= 1
            return True
        return False

    def close(self) -> None:
        pass


class RemoteModel(LoaderModel):
    """A loader whose worker processes are tasks."""

    def run(self) -> None:
        real = processes.Processes
        FakeProcesses.draw, FakeProcesses.deaths = self.draw, self.draw.choice([0, 1])
        processes.Processes = FakeProcesses  # type: ignore[assignment, misc]
        try:
            super().run()
        finally:
            processes.Processes = real  # type: ignore[misc]


class ProcessStage(RemoteModel):
    """A stage in worker processes, of which one may die at some row."""

    def graph(self, variant: int) -> pg.Graph:
        graph = pg.Graph("process")
        node = graph.add(ops.FromSequence(range(9)), name="source")
        backend: Any = "process" if variant else "inline"
        node = node.then(
            mapped(add_one, 4), name="map", backend=backend, workers=1 + variant % 2 if variant else 1
        )
        node.then(ops.Map(triple), name="last", capacity=1 + variant % 3)
        return graph
