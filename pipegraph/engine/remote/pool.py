"""Makes the proxies of a loader's remote stages, with their hosts."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from pipegraph.bundle import Pack
from pipegraph.contracts import Context, Operator, Source
from pipegraph.engine.remote.host import Host
from pipegraph.engine.remote.proxies import remote
from pipegraph.planning.plan import Plan, StagePlan

Sealed = TypeVar("Sealed")
"""An operator as a backend sends it."""


class Pool(ABC, Generic[Sealed]):
    """Makes the proxies of the stages of a plan that are remote by one backend."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sent: dict[str, Sealed] = {}

    def operator(self, stage: StagePlan, context: Context) -> Any:
        """A proxy for the operator of one worker.

        Raises:
            GraphError: the operator cannot be sent to another process.
        """
        operator = stage.operator
        # Stages with equal ``sent_as`` share one pickled operator.
        like = stage.traits.sent_as
        name = f"={like}" if like else stage.name
        if name not in self._sent:
            self._sent[name] = self._seal(operator, stage.name)
        host = self._host(stage, context, self._sent[name], (context, self._packing(stage)))
        return remote(copy.copy(operator), host, stage.name, stage.spec.timeout)

    @abstractmethod
    def close(self) -> None:
        """Called after every worker has closed its own host."""

    @abstractmethod
    def _seal(self, operator: Operator | Source, stage: str) -> Sealed:
        """The pickled operator of a stage, once for all workers.

        Raises:
            NotPicklableError: it cannot be pickled.
        """

    @abstractmethod
    def _host(self, stage: StagePlan, context: Context, sealed: Sealed, opening: tuple[object, ...]) -> Host:
        """The host of one worker's operator; ``opening`` is what ``child.opened_worker`` needs besides it."""

    def _packing(self, stage: StagePlan) -> Pack | None:
        """The function with which the ``Batch`` right after a stage packs rows; None if there is none."""
        below = [self._plan.stages[name] for name, _, _ in self._plan.consumers(stage.name)]
        return below[0].packing() if below and stage.bundle_rows > 1 else None
