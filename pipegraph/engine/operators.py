"""The operators of a loader's workers: makes, opens and closes them, with the hosts of those in other processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipegraph.backends import BACKENDS, StageBackend
from pipegraph.engine.loader_context import LoaderContext
from pipegraph.engine.stage_worker import Worker
from pipegraph.errors import Naming, described
from pipegraph.planning.plan import StagePlan

if TYPE_CHECKING:
    from pipegraph.engine.remote.pool import Pool


class Operators:
    """See the module docstring. An operator is opened and closed by its worker's thread; those of inline stages and the
    readers of sources by the one that starts the loader."""

    def __init__(self, loader: LoaderContext, fail: Callable[[BaseException], None]) -> None:
        self._loader = loader
        self._fail = fail
        self._pools: dict[StageBackend, Pool[Any]] = {}
        self._opened: list[tuple[str, object]] = []  # not by workers' threads
        self._errors: list[str] = []

    def make_all(self) -> dict[str, list[object]]:
        """Those of the first workers of each stage; opens the sources' readers."""
        loader = self._loader
        plan, readers = loader.plan, loader.readers
        for backend in BACKENDS.values():
            if backend.pool and any(stage.backend == backend for stage in plan.running):
                self._pools[backend] = backend.load_pool()(plan, self._fail)
        made = {
            stage.name: [self.make(stage, index) for index in range(stage.workers)] for stage in plan.running
        }
        for stage in plan.running:
            if stage.source is not None and stage.source.random_access:
                readers[stage.name] = copy.copy(stage.source)
        if any(stage.caches for stage in plan.running):
            from pipegraph.engine.stage.cache_wiring import wire_cache

            wire_cache(plan, made, readers)
        for name, reader in readers.items():
            with Naming(name, "open", ": the source could not be opened"):
                reader.open(loader.context(name, 0))
            self._opened.append((name, reader))
        return made

    def make(self, stage: StagePlan, index: int) -> Any:
        """The operator of one worker: a copy, or a proxy for one in another process."""
        if not stage.remote:
            return copy.copy(stage.operator)
        return self._pools[stage.backend].operator(stage, self._loader.context(stage.name, index))

    def open(self, stage: StagePlan, worker: Worker) -> None:
        """Open a worker's operator."""
        name = stage.name
        with Naming(name, "open", f": worker {worker.index} could not be started"):
            worker.operator.open(self._loader.context(name, worker.index))
        if stage.backend.in_consumer:
            self._opened.append((name, worker.operator))

    def close_one(self, stage: str, operator: Any) -> None:
        """Close a worker's operator or a reader; an error becomes a warning at the end."""
        try:
            operator.close()
        except BaseException as error:
            self._errors.append(f"stage {stage!r}: close() raised {described(error)}")

    def close(self) -> list[str]:
        """Close what no worker's thread does; returns what went wrong in all closes."""
        while self._opened:
            self.close_one(*self._opened[-1])
            self._opened.pop()  # last: what was interrupted is closed by the next call
        while self._pools:
            next(iter(self._pools.values())).close()
            self._pools.pop(next(iter(self._pools)))
        errors, self._errors = self._errors, []
        return errors
