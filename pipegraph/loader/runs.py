"""The crew of a loader, which its first pass starts, and its runs, which a pass continues or replaces."""

from __future__ import annotations

import sys
import warnings
import weakref
from math import inf
from typing import TYPE_CHECKING, Any

from pipegraph import concurrency
from pipegraph.capabilities import functions_of
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.crew import Crew
from pipegraph.engine.run import Run
from pipegraph.engine.stage.ledger import Ledger
from pipegraph.engine.tracing import Tracer
from pipegraph.errors import LoaderClosedError, PipegraphWarning
from pipegraph.loader.lengths import check_counts_known
from pipegraph.loader.options import LoaderOptions
from pipegraph.loader.place import Place
from pipegraph.loader.position import Progress
from pipegraph.loader.ranks import agree_on_seed
from pipegraph.machine import available_memory
from pipegraph.nested_samplers import keeps_state
from pipegraph.planning.plan import Plan

if TYPE_CHECKING:
    from pipegraph.loader.same_data import SameData


class Runs:
    """What the passes of one loader share. Refers to no loader and no pass.

    Attributes:
        closed: why there are no more; ``""`` while there may be.
        group: for the agreement on equal steps.
        same_data: the comparison with other ranks, where there are any.
    """

    def __init__(self, plan: Plan, options: LoaderOptions, seed: int | None) -> None:
        self.plan = plan
        self.options = options
        self.seed = seed
        self.closed = ""
        self.tracer = Tracer()
        self.ledger = Ledger()
        self.progress = Progress(plan, self.ledger)
        self.group: Any = None
        self.same_data: SameData | None = None
        self.crew: Crew | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def start(self, loader: object) -> Crew:
        """The crew, made if there is none; it ends when the loader is garbage-collected.

        Raises:
            LoaderClosedError: the loader was closed meanwhile.
        """
        if self.crew is not None and self.crew.half_started and not self.closed:  # interrupted before
            self.crew.close()
            self.crew = None
        if self.crew is None:
            options = self.options
            rank, world_size = options.own()
            if options.equal_steps is None:
                check_counts_known(self.plan, world_size)
            if world_size > 1 and options.equal_steps and self.group is None:
                from pipegraph.loader.equal_steps import own_group

                self.group = own_group(world_size)
            waits = self.group is not None or self.seed is None
            self.seed = agree_on_seed(self.seed, rank, world_size)
            if (
                self.same_data is None and world_size > 1
            ):  # one that was interrupted is that of the other ranks
                from pipegraph.loader.same_data import same_data

                asked = options.rank, options.world_size, options.mesh
                self.same_data = same_data(self.plan, rank, world_size, asked, waits)
            limit = options.memory_limit or max(1, available_memory() // 2)
            crew = Crew(self.plan, limit, self.seed, rank, world_size)
            crew.ledger = self.ledger
            crew.tracer = self.tracer
            self.crew = crew
            # Holds the crew, never the loader: dropping the last reference to the loader ends its threads.
            self._finalizer = weakref.finalize(loader, _finalize, crew)
        # Looked at once the crew is there: a close() before that has not seen it, one from now on will.
        self.refuse_closed()
        return self.crew

    def run_from(self, place: Place, crew: Crew) -> Run:
        """The run there is, where it continues with this place by itself; else another."""
        epoch, run = place.epoch, crew.run
        epochs = self.options.epochs
        horizon = inf if epochs is None else max(epoch, epochs - 1)
        progress = self.progress
        if run is not None and not run.over and progress.continues_to(place):
            progress.broken(failed=False)  # until the pass has begun: an interrupted one does not continue
            run.horizon.raise_to(horizon if place.start.stream is None else epoch, epoch)
            return run
        delivered = progress.idle or not progress.untouched
        try:
            crew.end_run()  # its workers may still write into the ledger
            progress.broken(failed=False)
            progress.rest_at(place)  # first: a state of the pass before needs what the ledger now forgets
            self.ledger.begin(delivered)
            if place.start.stream is not None:
                horizon = epoch
            elif place.nothing:
                horizon = epoch - 1  # nothing is read
            progress.read_from(place)
            return crew.start_run(epoch, horizon, place.resume())
        except Cancelled:
            self.close()
            self.refuse_closed()
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                self.close()
            elif crew.half_started:  # Ctrl-C: the next pass starts another
                crew.close()
            raise

    def compare_data(self, place: Place) -> None:
        """Raises DataError if other ranks see other data; see :mod:`pipegraph.loader.same_data`."""
        if self.same_data is None:
            return
        try:
            self.same_data.compare(self.seed, place.words)
        except Exception:  # after Ctrl-C the next pass compares
            self.close()
            raise

    def rest(self, seed: int | None) -> None:
        """End the run, and the crew too if its workers were opened with another seed."""
        if self.crew is not None and self.seed != seed:
            self.crew.close()
            self.crew = None
        self.seed = seed
        if self.crew is not None:
            self.crew.end_run()  # its workers may still write into the ledger

    def refuse_closed(self) -> None:
        if self.closed:
            raise LoaderClosedError(f"{self.closed}; make another with graph.loader(...)")

    def close(self) -> None:
        """End all threads; what was measured stays."""
        self.closed = self.closed or "this loader is closed"
        if self.crew is not None:
            self.crew.pass_totals.end()
            self.crew.close()
            self.detach()

    def detach(self) -> None:
        """Leave the crew to itself when the loader goes."""
        if self._finalizer is not None:
            self._finalizer.detach()


def warn_of_unsaved(plan: Plan) -> None:
    """Functions of stages have no state that is saved."""
    for stage in plan.running:
        for function in () if stage.source is not None else functions_of(stage.operator):
            if keeps_state(function):
                kind = type(function).__qualname__
                warnings.warn(
                    f"stage {stage.name!r}: a {kind} has state_dict() and load_state_dict(), and the loader's state "
                    "does not hold it: the state of a function is not saved. If what it returns depends on it, make "
                    f"{kind} a pg.Operator with these methods; the stage then resumes from them",
                    PipegraphWarning,
                    stacklevel=5,
                )


def _finalize(crew: Crew) -> None:
    """End the threads of a loader that was collected, or whose interpreter exits."""
    if concurrency.current_thread() is concurrency.main_thread():
        crew.close()
    elif not sys.is_finalizing():
        # The garbage collector may run in any thread, even in a worker of ours that holds one of our locks.
        concurrency.start_new_thread(_close_elsewhere, (crew,))


def _close_elsewhere(crew: Crew) -> None:
    # From a thread made by ``threading``: joining in any other would leave a dummy thread object there.
    concurrency.Thread(target=crew.close, name="pipegraph-closer", daemon=True).start()
