"""The worker processes of one loader."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from pipegraph.contracts import Context
from pipegraph.engine.process import zygote
from pipegraph.engine.process.contract import Host
from pipegraph.engine.process.process_host import ProcessHost
from pipegraph.engine.process.remote_kinds import remote
from pipegraph.engine.process.remote_run import RemoteRun, SourceRun
from pipegraph.engine.process.sealed import Sealed
from pipegraph.engine.process.sidecar import Sidecar
from pipegraph.engine.process.thread_host import ThreadHost
from pipegraph.errors import GraphError, WorkerDiedError
from pipegraph.machine import lacking_for_processes
from pipegraph.planning.plan import Plan, StagePlan


def under_deadline(stage: StagePlan, context: Context) -> Any:
    """A proxy for the operator of a thread worker whose items have a deadline."""
    timeout_s = stage.spec.timeout
    assert timeout_s is not None
    host = ThreadHost(stage.operator, context, timeout_s)
    return remote(copy.copy(stage.operator), host, stage.name, timeout_s)


class Pool(ABC):
    """Makes the proxies of the stages of a plan that run elsewhere."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sent: dict[str, Any] = {}

    def operator(self, stage: StagePlan, contexts: Sequence[Context]) -> Any:
        """A proxy for the operator of one worker; ``contexts`` are the stage's and its followers'.

        Raises:
            GraphError: the operator cannot be sent to another process.
        """
        operator, alone = stage.operator, not stage.followers
        # Stages with equal ``sent_as`` share one pickled operator.
        name = f"={operator.sent_as}" if operator.sent_as and alone else stage.name
        if name not in self._sent:
            self._sent[name] = self._send((stage, *stage.followers))
        host = self._host(stage, contexts, self._sent[name])
        if alone:
            return remote(copy.copy(operator), host, stage.name, stage.spec.timeout)
        kind = SourceRun if stage.source is not None else RemoteRun
        return kind(host, copy.copy(operator), stage.name, stage.spec.timeout)

    @abstractmethod
    def close(self) -> None:
        """Called after every worker has closed its own host."""

    @abstractmethod
    def _send(self, run: Sequence[StagePlan]) -> Any:
        """The pickled operators of fused stages, once for all workers; raises GraphError if they cannot be pickled."""

    @abstractmethod
    def _host(self, stage: StagePlan, contexts: Sequence[Context], sent: Any) -> Host:
        """The host of one worker's operators."""

    def _packing(self, stage: StagePlan) -> Callable[[list[Any]], Any] | None:
        """The function with which the ``Batch`` right after a stage packs rows; None if there is none."""
        below = [self._plan.stages[name] for name, _, _ in self._plan.consumers(stage.name)]
        if stage.bundle is None or stage.bundle != below[0].name:
            return None
        packs: Any = below[0].operator
        found: Callable[[list[Any]], Any] | None = packs.packing()
        return found


class Processes(Pool):
    """The worker processes of one loader. Made before the loader has threads, so that the zygote can be forked.

    Raises:
        GraphError: this system lacks what worker processes need.
    """

    def __init__(self, plan: Plan, fail: Callable[[WorkerDiedError], None]) -> None:
        super().__init__(plan)
        missing = lacking_for_processes()
        if missing:
            raise GraphError(
                f"backend='process' needs Linux: this Python has no {', '.join(missing)}; use backend='thread'"
            )
        self._borrowed: zygote.Zygote | None = None

    @property
    def _zygote(self) -> zygote.Zygote:
        """The zygote, borrowed only when the first operator has been pickled."""
        if self._borrowed is None:
            self._borrowed = zygote.borrow()
        return self._borrowed

    def _send(self, run: Sequence[StagePlan]) -> Sealed:
        try:
            return Sealed([each.operator for each in run], run[0].name)
        except GraphError:
            for each in run:  # find the one that cannot be pickled
                Sealed([each.operator], each.name).close()
            raise

    def _host(self, stage: StagePlan, contexts: Sequence[Context], sent: Sealed) -> Host:
        def count(member: int, name: str, n: int) -> None:
            contexts[member].count(name, n)

        given = contexts[0], self._packing(stage), contexts[1:], stage.spec.on_error != "raise"
        return ProcessHost(self._zygote, sent, contexts[0], given, stage.spec.timeout, count)

    def sidecar(self, plan: Plan, facts: tuple[int, int, int, int]) -> Sidecar:
        """The sidecar, in which a whole plan runs.

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
        self._sent[""] = sealed
        return Sidecar(self._zygote, sealed, facts)

    def close(self) -> None:
        """Called after every worker has closed its own process."""
        for sealed in self._sent.values():
            sealed.close()
        if self._borrowed is not None:
            zygote.release(self._borrowed)
