"""The worker processes of one loader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from pipegraph.contracts import Context, Regroup, Source
from pipegraph.engine.process import zygote
from pipegraph.engine.process.contract import Host
from pipegraph.engine.process.process_host import ProcessHost
from pipegraph.engine.process.remote_kinds import remote
from pipegraph.engine.process.remote_run import MapRun, SourceRun
from pipegraph.engine.process.sealed import Sealed
from pipegraph.engine.process.sidecar import Sidecar
from pipegraph.engine.process.thread_host import ThreadHost
from pipegraph.errors import GraphError
from pipegraph.machine import lacking_for_processes
from pipegraph.planning.plan import Plan, StagePlan


def under_deadline(stage: StagePlan, context: Context) -> Any:
    """What one worker of a stage in threads holds in place of its operator, where an item has a deadline."""
    timeout_s = stage.spec.timeout
    assert timeout_s is not None
    host = ThreadHost(stage.operator, context, timeout_s)
    return remote(copy.copy(stage.operator), host, stage.name, timeout_s)


def packing(plan: Plan, stage: StagePlan) -> Callable[[list[Any]], Any] | None:
    """How the ``Batch`` right behind a stage wants its rows put together; None where there is none."""
    below = [plan.stages[name] for name, _, _ in plan.consumers(stage.name)]
    if stage.bundle is None or stage.bundle != below[0].name:
        return None
    assert isinstance(below[0].operator, Regroup)
    return below[0].operator.packing()


def sealed_as(stage: StagePlan) -> str:
    """The name under which a loader keeps what it sends for a stage. Stages whose ``sent_as`` is the same share it."""
    if stage.operator.sent_as and not stage.followers:
        return f"={stage.operator.sent_as}"
    return stage.name


def judged_member(stage: StagePlan) -> int:
    """The number of the stage in its run whose policy continues after a failure; -1 where none does."""
    if stage.spec.on_error == "raise":
        return -1
    return [each.name for each in (stage, *stage.followers)].index(stage.judged)


def stand_in(stage: StagePlan, host: Host) -> Any:
    """What a worker's thread holds in place of what a stage, and its followers, do in ``host``."""
    if not stage.followers:
        return remote(copy.copy(stage.operator), host, stage.name, stage.spec.timeout)
    kind = SourceRun if isinstance(stage.operator, Source) else MapRun
    return kind(host, copy.copy(stage.operator), stage.name, stage.spec.timeout)


def _sealed(run: Sequence[StagePlan]) -> Sealed:
    """The operators of a run of stages.

    Raises:
        GraphError: one of them cannot be sent to another process; says of which stage it is.
    """
    try:
        return Sealed([each.operator for each in run], run[0].name)
    except GraphError:
        for each in run:
            Sealed([each.operator], each.name).close()
        raise


class Processes:
    """Made before the loader has threads: then the zygote can be a fork of this process.

    Raises:
        GraphError: this system does not offer what worker processes need.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        missing = lacking_for_processes()
        if missing:
            raise GraphError(
                f"backend='process' needs Linux: this Python has no {', '.join(missing)}; use backend='thread'"
            )
        self._borrowed: zygote.Zygote | None = None
        self._sealed: dict[str, Sealed] = {}

    @property
    def _zygote(self) -> zygote.Zygote:
        """Once the first operator is known to be one that can be sent."""
        if self._borrowed is None:
            self._borrowed = zygote.borrow()
        return self._borrowed

    def operator(self, stage: StagePlan, contexts: Sequence[Context]) -> Any:
        """What one worker of a stage holds in place of its operator; ``contexts`` are the stage's and its followers'.

        Raises:
            GraphError: the operator cannot be sent to another process.
        """
        sent_as = sealed_as(stage)
        if sent_as not in self._sealed:
            self._sealed[sent_as] = _sealed((stage, *stage.followers))
        given = contexts[0], packing(self._plan, stage), contexts[1:], judged_member(stage)

        def count(member: int, name: str, n: int) -> None:
            contexts[member].count(name, n)

        sealed, timeout_s = self._sealed[sent_as], stage.spec.timeout
        return stand_in(stage, ProcessHost(self._zygote, sealed, contexts[0], given, timeout_s, count))

    def sidecar(self, plan: Plan, facts: tuple[int, int, int, int]) -> Sidecar:
        """The process that a whole plan runs in.

        Raises:
            GraphError: an operator cannot be sent to another process.
        """
        instead = "leave out isolate=True"
        try:
            sealed = Sealed(plan, "", instead)
        except GraphError:
            for stage in plan.running:
                Sealed(stage.operator, stage.name, instead).close()
            raise
        self._sealed[""] = sealed
        return Sidecar(self._zygote, sealed, facts)

    def close(self) -> None:
        """Once every worker has closed its own."""
        for sealed in self._sealed.values():
            sealed.close()
        if self._borrowed is not None:
            zygote.release(self._borrowed)
