"""The worker processes of one loader."""

from __future__ import annotations

from collections.abc import Callable

from pipegraph.backends import PROCESS
from pipegraph.contracts import Context, Operator, Source
from pipegraph.engine.process import zygote
from pipegraph.engine.process.process_host import ProcessHost
from pipegraph.engine.process.sealed import Sealed
from pipegraph.engine.process.surroundings import fill_standard_descriptors
from pipegraph.engine.remote.host import Host
from pipegraph.engine.remote.pool import Pool
from pipegraph.errors import GraphError, WorkerDiedError
from pipegraph.machine import lacking_for_processes
from pipegraph.planning.plan import Plan, StagePlan


class Processes(Pool[Sealed]):
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
        fill_standard_descriptors()

    @property
    def parent(self) -> zygote.Zygote:
        """The zygote, borrowed only when the first operator has been pickled."""
        if self._borrowed is None:
            processes = [stage.workers for stage in self._plan.running if stage.backend == PROCESS]
            self._borrowed = zygote.borrow(sum(processes))
        return self._borrowed

    def _seal(self, operator: Operator | Source, stage: str) -> Sealed:
        return Sealed(operator, stage, copies=not operator.traits.inherits)

    def _host(self, stage: StagePlan, context: Context, sealed: Sealed, opening: tuple[object, ...]) -> Host:
        return ProcessHost(self.parent, sealed, context, opening, stage.spec.timeout)

    def close(self) -> None:
        """Called after every worker has closed its own process."""
        for sealed in self._sent.values():
            sealed.close()
        if self._borrowed is not None:
            zygote.release(self._borrowed)
