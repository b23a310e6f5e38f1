"""Makes the proxies of a loader's remote stages, with their hosts."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from pipegraph.capabilities import BundleRegroup, Interchangeable
from pipegraph.contracts import Context
from pipegraph.engine.remote.host import Host
from pipegraph.engine.remote.proxies import remote
from pipegraph.errors import GraphError
from pipegraph.planning.plan import Plan, StagePlan


class Pool(ABC):
    """Makes the proxies of the stages of a plan that are remote by one backend."""

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
        like = operator.can(Interchangeable)
        name = f"={like.sent_as}" if like is not None and alone else stage.name
        if name not in self._sent:
            self._sent[name] = self._sealed((stage, *stage.followers))
        opening = contexts, self._packing(stage), stage.spec.on_error != "raise"
        host = self._host(stage, contexts, self._sent[name], opening)
        if alone:
            return remote(copy.copy(operator), host, stage.name, stage.spec.timeout)
        from pipegraph.engine.remote.fused_proxies import RemoteRun, SourceRun

        kind = SourceRun if stage.source is not None else RemoteRun
        return kind(host, copy.copy(operator), stage.name, stage.spec.timeout)

    def _sealed(self, run: Sequence[StagePlan]) -> Any:
        try:
            return self._seal([each.operator for each in run], run[0].name)
        except GraphError:
            for each in run:  # find the one that cannot be pickled
                self._sent[each.name] = self._seal([each.operator], each.name)
            raise

    @abstractmethod
    def close(self) -> None:
        """Called after every worker has closed its own host."""

    @abstractmethod
    def _seal(self, operators: Sequence[Any], stage: str) -> Any:
        """The pickled operators of fused stages, once for all workers.

        Raises:
            NotPicklableError: they cannot be pickled.
        """

    @abstractmethod
    def _host(
        self, stage: StagePlan, contexts: Sequence[Context], sealed: Any, opening: tuple[Any, ...]
    ) -> Host:
        """The host of one worker's operators; ``opening`` is what ``child.opened_worker`` needs besides these."""

    def _packing(self, stage: StagePlan) -> Callable[[list[Any]], Any] | None:
        """The function with which the ``Batch`` right after a stage packs rows; None if there is none."""
        below = [self._plan.stages[name] for name, _, _ in self._plan.consumers(stage.name)]
        if stage.bundle is None or stage.bundle != below[0].name:
            return None
        collecting = below[0].operator.can(BundleRegroup)
        return None if collecting is None else collecting.packing()
