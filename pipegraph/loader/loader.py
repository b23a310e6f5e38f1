"""``Loader``: the object a training loop iterates.

::

    with graph.loader(epochs=90) as loader:
        for epoch in range(loader.epoch, 90):
            for batch in loader: ...

One ``for`` is one pass over one epoch. Call the loader's methods in one thread, the one that iterates it. Only
``profile()``, ``metrics()``, ``tuning()``, ``state_dict()`` and ``close()`` are thread-safe.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import inf
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from pipegraph import concurrency, forks
from pipegraph.chunk import Chunk
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.crew import Crew
from pipegraph.engine.run import Run
from pipegraph.engine.stage.ledger import Ledger, Quarantined
from pipegraph.engine.tracing import Events, Tracer
from pipegraph.errors import GraphError, LoaderClosedError, NeverStops, PipegraphWarning
from pipegraph.graph import Graph, Node
from pipegraph.integers import integer
from pipegraph.loader.digests import digests, functions_of
from pipegraph.loader.epoch_pass import Pass
from pipegraph.loader.equal_steps import check_counts_known, length_of, warn_of_unequal
from pipegraph.loader.options import LoaderOptions as LoaderOptions, agree_on_seed
from pipegraph.loader.pass_totals import PassTotals
from pipegraph.loader.place import VERSION, Place
from pipegraph.loader.position import Progress
from pipegraph.machine import available_memory
from pipegraph.planning.planner import tune_all, why_not_tuned
from pipegraph.stopping import Closing

if TYPE_CHECKING:
    from pipegraph.loader.same_data import SameData
    from pipegraph.measurements import Measured
    from pipegraph.planning.plan import Plan
    from pipegraph.profile import Profile
    from pipegraph.profile.live import LogLines
    from pipegraph.profile.search import Tuning
    from pipegraph.profile.tuner import Tuner


class Loader(Closing):
    """A running pipeline. :meth:`pipegraph.Graph.loader` creates it and documents the arguments."""

    def __init__(self, graph: Graph, output: Node | str | None, options: LoaderOptions) -> None:
        self.plan = tune_all(graph.plan(output)) if options.autotune else graph.plan(output)
        self._graph = graph
        self._output = output
        self._options = options
        self._seed = graph.seed
        self._closed = ""  # why there are no more passes
        self._tracer = Tracer()
        self._ledger = Ledger()
        self._progress = Progress(self.plan, self._ledger)
        self._crew: Crew | None = None
        self._totals: PassTotals | None = None  # of the crew
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._group: Any = None  # for the agreement on equal steps
        self._same_data: SameData | None = None  # the comparison with other ranks, where there are any
        self._pass: weakref.ref[Pass] | None = None
        self._digest: dict[str, str] | None = None
        self._tuner: Tuner | None = None
        if any(stage.tuned for stage in self.plan.running):
            from pipegraph.profile.tuner import Tuner

            self._tuner = Tuner(self.plan)
        # They watch the passes, in the training loop's thread, and refer to the loader weakly at most.
        self._observers: list[Tuner | LogLines] = [] if self._tuner is None else [self._tuner]
        if options.log_every is not None:
            from pipegraph.profile.live import LogLines

            self._observers.append(LogLines(options.log_every))
        self._turn = concurrency.RLock()  # who begins a pass or takes the next chunk
        self._left_behind: object = None  # of the process that forked this one
        forks.notify(self)

    # -- passes --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the running pass; between passes, the epoch of the next one."""
        running = self._running()
        if running is not None:
            return running.epoch
        return self._progress.next_place().epoch

    def _running(self) -> Pass | None:
        current = self._pass() if self._pass is not None else None
        return current if current is not None and not current.over else None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. During a pass, this means the pass after it.

        If ``epoch`` equals :attr:`epoch`, nothing changes, so a training loop may call this before every epoch. Any
        other epoch discards prefetched work. If a state was loaded and nothing was delivered since, it also discards
        the restored position, with a warning.
        """
        epoch = integer(epoch, "epoch", 0)
        if epoch == self.epoch:
            return
        place = Place(epoch)
        if self._running() is None:
            self._warn_of_dropping(place, 3)
            self._progress.rest_at(place)
        else:
            self._progress.chosen = place

    def _warn_of_dropping(self, place: Place, stacklevel: int) -> None:
        if self._progress.drops_restored(place):
            restored = self._progress.place.epoch
            warnings.warn(
                f"set_epoch({place.epoch}) discards what was restored of epoch {restored}, of which nothing was "
                "delivered yet; call set_epoch(loader.epoch) or nothing after load_state_dict() to continue with it",
                PipegraphWarning,
                stacklevel=stacklevel,
            )

    def __iter__(self) -> Iterator[Any]:
        """Begin the next pass. This ends a running pass; its iterator then raises an error."""
        return self._begin(whole=False)

    def chunks(self) -> Iterator[Chunk]:
        """Begin the next pass; it gives :class:`~pipegraph.Chunk` objects with keys, positions and epoch."""
        return self._begin(whole=True)

    def _begin(self, whole: bool) -> Pass:
        progress = self._progress
        self._refuse_closed()
        started = perf_counter_ns()
        with self._turn, NeverStops("the start of a pass"):
            old = self._running()
            place = progress.next_place()
            self._warn_of_dropping(place, 4)
            if old is not None:
                old.end("a new pass over the loader has begun")
            crew, totals = self._start()
            totals.end()  # before the run may be cancelled, which ends its waits
            run = self._run_from(place, crew)
            # Known before a signal handler may ask for it, and behind the start, in which sources look for their data
            # so that a close ends the search.
            with suppress(Exception):  # the caller gets the error
                self._digests(anew=True)  # a state names the length that the data has now
                if not progress.started_ns and self._options.equal_steps is None:
                    warn_of_unequal(self.plan, place, crew.world_size, self._seed)
            if self._same_data is not None:
                try:
                    self._same_data.compare(self._seed, place.words)
                except Exception:  # after Ctrl-C the next pass compares
                    self._end()
                    raise
            interval = totals.begin(run)
            progress.pass_begins(place, run)
            if not progress.started_ns:
                progress.started_ns = started
            for observer in self._observers:
                observer.begins(self, crew)
            current = Pass(self, crew, totals, run, interval, whole)
            self._pass = weakref.ref(current)
            return current

    def _start(self) -> tuple[Crew, PassTotals]:
        """The crew, made if there is none; it ends when the loader is garbage-collected.

        Raises:
            LoaderClosedError: the loader was closed meanwhile.
        """
        if self._crew is not None and self._crew.half_started and not self._closed:  # interrupted before
            self._crew.close()
            self._crew = None
        if self._crew is None:
            options = self._options
            rank, world_size = options.own()
            if options.equal_steps is None:
                check_counts_known(self.plan, world_size)
            if world_size > 1 and options.equal_steps and self._group is None:
                from pipegraph.loader.equal_steps import own_group

                self._group = own_group(world_size)
            waits = self._group is not None or self._seed is None
            self._seed = agree_on_seed(self._seed, rank, world_size)
            # One that was interrupted is that of the other ranks.
            if self._same_data is None and world_size > 1:
                from pipegraph.loader.same_data import same_data

                asked = options.rank, options.world_size, options.mesh
                self._same_data = same_data(self.plan, rank, world_size, asked, waits)
            limit = options.memory_limit or max(1, available_memory() // 2)
            crew = Crew(self.plan, limit, self._seed, rank, world_size)
            crew.ledger, crew.tracer = self._ledger, self._tracer
            self._totals, self._crew = PassTotals(crew), crew
            # Holds the crew, never the loader: dropping the last reference to the loader ends its threads.
            self._finalizer = weakref.finalize(self, _finalize, crew)
        # Looked at once the crew is there: a close() before that has not seen it, one from now on will.
        self._refuse_closed()
        assert self._totals is not None
        return self._crew, self._totals

    def _run_from(self, place: Place, crew: Crew) -> Run:
        """The run there is, where it continues with this place by itself; else another."""
        epoch, run, progress = place.epoch, crew.run, self._progress
        horizon = inf if self._options.epochs is None else max(epoch, self._options.epochs - 1)
        if run is not None and not run.over and progress.continues_to(place):
            progress.broken(failed=False)  # until the pass has begun: an interrupted one does not continue
            run.horizon.raise_to(horizon if place.start.stream is None else epoch, epoch)
            return run
        delivered = progress.idle or not progress.untouched
        try:
            crew.end_run()  # its workers may still write into the ledger
            progress.broken(failed=False)
            progress.rest_at(place)  # first: a state of the pass before needs what the ledger now forgets
            self._ledger.begin(delivered)
            if place.start.stream is not None:
                horizon = epoch
            elif place.nothing:
                horizon = epoch - 1  # nothing is read
            place.anew = progress.beginnings_of(place)  # before the sources are read
            return crew.start_run(epoch, horizon, place.resume())
        except Cancelled:
            self._end()
            self._refuse_closed()
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                self._end()
            elif crew.half_started:  # Ctrl-C: the next pass starts another
                crew.close()
            raise

    # -- length --------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of chunks per epoch on this rank.

        With ``equal_steps=True``, the number on the rank that has the fewest. In an epoch that resumes from a state,
        the number that was left.

        Raises:
            TypeError: the number depends on the data (a filter, a flat map, a source without a length ...).
        """
        place = self._progress.place if self._running() is not None else self._progress.next_place()
        return length_of(self.plan, place, self._options, self._ledger, self._seed)

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader, as a small JSON-serialisable dict with a fixed set of keys.

        After loading it, the next pass delivers what follows: if it was taken inside the loop, the rest of the epoch
        after the last delivered chunk; after the loop, a whole epoch; after a ``break``, the rest of that epoch.

        Thread-safe at any moment, also in a signal handler: it waits for no lock of the pipeline. In a handler, the
        last chunk that the loop received counts as delivered, even if the loop has not trained on it yet.
        """
        return self._state()

    def _state(self, ended: bool = False) -> dict[str, Any]:
        """The state; ``ended``: as if the pass had run to its end."""
        rank, world_size = self._options.own()
        part = self._progress.part((rank, world_size), ended)
        # Where any rank's part is enough there is one key for all, which other ranks find in a checkpoint of
        # torch.distributed.checkpoint, however many had saved it.
        key = "rank0" if self.plan.one_place else f"rank{rank}"
        return {
            "version": VERSION,
            "seed": self._seed,
            "world_size": world_size,
            "digest": dict(self._digests()),
            "functions": functions_of(self.plan),
            key: part,
        }

    def _digests(self, anew: bool = False) -> dict[str, str]:
        """What a state says of its graph."""
        found = self._digest
        if found is None or anew:
            found = self._digest = digests(self.plan)
        return found

    def load_state_dict(self, state: Any, allow: Sequence[str] = ()) -> None:
        """Resume from a state: the next pass delivers exactly what followed it.

        Args:
            state: what :meth:`state_dict` returned on this rank (it may contain parts of other ranks too). Or the list
                of all ranks' states: with it, a graph that is not elastic can also resume at another world size, with
                each sample exactly once, in another order.
            allow: names of stages that were changed, added or removed since the state was taken. The sources' positions
                are kept, everything else begins anew, and a warning says so.

        Raises:
            StateError: the state is from another graph, version or world size; the message says what differs.
        """
        from pipegraph.loader.state import read_state

        self._refuse_closed()
        rank, world_size = self._options.own()
        equal = self._options.equal_steps is not False
        found = read_state(state, allow, self.plan, rank, world_size, equal)
        running = self._running()
        if running is not None:
            running.end("a state was loaded")
        if self._crew is not None:
            self._crew.end_run()  # its workers may still write into the ledger
            if self._seed != found.seed:  # with which they were opened
                self._crew.close()
                self._crew = None
        self._seed = found.seed
        self._ledger.load(found.epoch, found.ledger)
        self._progress.broken(failed=False)
        self._progress.rest_at(Place.restored_to(found, (rank, world_size)))

    # -- looking -------------------------------------------------------------------------------

    def profile(self, since: Profile | None = None) -> Profile:
        """What every stage did and waited for, also after an error or ``close()``. Thread-safe.

        Args:
            since: an earlier profile of this loader; only what happened after it counts. By default everything.

        Raises:
            GraphError: ``since`` is from another graph.
        """
        from pipegraph.profile import profile_of

        return profile_of(*self._counted(), since)

    def _counted(self) -> tuple[Plan, Measured, Sequence[Quarantined], int]:
        """What a profile is made of."""
        return self.plan, self._measure(), *self._ledger.shown()

    def _measure(self) -> Measured:
        """All that was counted so far, for profiles and the tuner."""
        totals, progress = self._totals, self._progress
        if self._crew is None or totals is None:
            from pipegraph.measurements import Measured

            return Measured()
        first_ns = progress.first_batch_ns
        first_s = (first_ns - progress.started_ns) / 1e9 if first_ns else None
        waits = progress.waits.durations()
        return totals.measure(*progress.totals, waits, first_s, progress.in_pass())

    def _trace(self, on: bool) -> tuple[Events, dict[int | None, str]]:
        """Trace from now on, or no more; returns the events since then and the names of the workers' threads.

        Raises:
            GraphError: it is traced already.
        """
        if on and self._tracer.on:
            raise GraphError("record: this loader is traced by another recording; one at a time has trace=")
        self._tracer.on = False
        events = self._tracer.take()
        self._tracer.on = on
        return events, {} if self._crew is None else self._crew.threads.names()

    def metrics(self) -> str:
        """The loader's profile since its start as OpenMetrics text, for Prometheus to scrape. Thread-safe.

        Raises:
            MissingExtraError: prometheus_client is not installed.
        """
        from pipegraph.profile.exports import render_metrics

        return render_metrics(self.profile())

    def tuning(self) -> Tuning:
        """What the tuner has decided so far, and the settings that it found, as code to paste. Thread-safe.

        Raises:
            GraphError: no stage of this loader is tuned.
        """
        if self._tuner is None:
            raise GraphError(why_not_tuned(self.plan))
        return self._tuner.tuning

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """End every thread of the pipeline; idempotent. Thread-safe, at any moment of a pass.

        Do not call it in a signal handler, because it waits for locks that a pass holds for moments. Raise an exception
        there instead, such as ``SystemExit``; the ``with`` around the loop then closes the loader.
        """
        self._closed = self._closed or "this loader is closed"
        running = self._running()
        if running is not None:
            running.end("the loader was closed")
        self._end()

    def _end(self) -> None:
        """End all threads; what was measured stays."""
        self._closed = self._closed or "this loader is closed"
        if self._crew is not None and self._totals is not None:
            self._totals.end()
            self._crew.close()
        if self._finalizer is not None:
            self._finalizer.detach()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise LoaderClosedError(f"{self._closed}; make another with graph.loader(...)")

    def _forked(self) -> None:
        """In a child that the process has forked: a thread that held one of our locks is not here to release it.

        A loader that has started stays with its threads in the parent. Nothing of its crew is touched here, nor
        freed; its profile is the parent's to give.
        """
        self._turn = concurrency.RLock()
        self._ledger.forked()
        if self._crew is None:
            return
        self._closed = self._closed or "this loader runs in the process that forked this one"
        running = self._running()
        if running is not None:
            running.end("its threads stayed in the process that forked this one")
            running.turn = self._turn
        self._left_behind, self._crew, self._totals = (self._crew, self._totals), None, None
        self._end()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._running() is not None else "waiting"
        return f"<Loader {self._graph.name}: {state}, epoch {self.epoch}, {self._progress.items} delivered>"


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
