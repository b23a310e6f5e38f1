"""``Loader``: the object a training loop iterates.

::

    with graph.loader(epochs=90) as loader:
        for epoch in range(loader.epoch, 90):
            for batch in loader: ...

One ``for`` is one pass over one epoch. Call the loader's methods in one thread, the one that iterates it. Only
``profile()``, ``metrics()``, ``tuning()``, ``state_dict()`` and ``close()`` are thread-safe.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from pipegraph import concurrency, forks
from pipegraph.chunk import Chunk
from pipegraph.closing import Closing
from pipegraph.engine.crew import Crew
from pipegraph.engine.tracing import Events, Tracer
from pipegraph.errors import GraphError, NeverStops, PipegraphWarning
from pipegraph.graph import Graph, Node
from pipegraph.integers import integer
from pipegraph.loader.delivered import VERSION
from pipegraph.loader.epoch_pass import Pass
from pipegraph.loader.lengths import length_of, warn_of_unequal
from pipegraph.loader.options import LoaderOptions as LoaderOptions
from pipegraph.loader.place import Place
from pipegraph.loader.runs import Runs, warn_of_unsaved
from pipegraph.planning.tunable import tune_all, why_not_tuned

if TYPE_CHECKING:
    from pipegraph.measured import Measured
    from pipegraph.profile import Profile
    from pipegraph.profile.headspace import Headspace
    from pipegraph.tuning.decisions import Tuning
    from pipegraph.tuning.tuner import Tuner


class Observer(Protocol):
    """Watches the passes of a loader, in the training loop's thread. Refers to the loader weakly at most."""

    def begins(self, loader: Any, crew: Any) -> None:
        """A pass begins, with these workers."""

    def asked(self, items: int) -> None:
        """The training loop asks for the next chunk, after this many."""


class Loader(Closing):
    """A running pipeline. :meth:`pipegraph.Graph.loader` creates it and documents the arguments."""

    def __init__(self, graph: Graph, output: Node | str | None, options: LoaderOptions) -> None:
        self.plan = tune_all(graph.plan(output)) if options.autotune else graph.plan(output)
        self._graph = graph
        self._output = output
        self._options = options
        self._runs = Runs(self.plan, options, graph.seed)
        self._progress = self._runs.progress
        self._ledger = self._runs.ledger
        self._pass: weakref.ref[Pass] | None = None
        self._digest: dict[str, str] | None = None
        self._tuner: Tuner | None = None
        if any(stage.tuned for stage in self.plan.running):
            from pipegraph.tuning.tuner import Tuner

            self._tuner = Tuner(self.plan)
        self._observers: list[Observer] = [] if self._tuner is None else [self._tuner]
        if options.log_every is not None:
            from pipegraph.profile.log_lines import LogLines

            self._observers.append(LogLines(options.log_every))
        self._turn = concurrency.RLock()  # who begins a pass or takes the next chunk
        self._left_behind: Crew | None = None  # of the process that forked this one
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

    def __next__(self) -> NoReturn:
        raise TypeError("a Loader is not an iterator: use `for batch in loader`, or next(iter(loader))")

    def chunks(self) -> Iterator[Chunk]:
        """Begin the next pass; it gives :class:`~pipegraph.Chunk` objects with keys, positions and epoch."""
        return self._begin(whole=True)

    def _begin(self, whole: bool) -> Pass:
        runs, progress = self._runs, self._progress
        runs.refuse_closed()
        started = perf_counter_ns()
        with self._turn, NeverStops("the start of a pass"):
            old = self._running()
            place = progress.next_place()
            self._warn_of_dropping(place, 4)
            if old is not None:
                old.end("a new pass over the loader has begun")
            crew = runs.start(self)
            crew.pass_totals.end()  # before the run may be cancelled, which ends its waits
            run = runs.run_from(place, crew)
            # Known before a signal handler may ask for it, and behind the start, in which sources look for their data
            # so that a close ends the search.
            with suppress(Exception):  # the caller gets the error
                self._digests(anew=True)  # a state names the length that the data has now
                if not progress.started_ns and self._options.equal_steps is None:
                    warn_of_unequal(self.plan, place, crew.world_size, runs.seed)
            runs.compare_data(place)
            interval = crew.pass_totals.begin(run)
            progress.pass_begins(place, run)
            if not progress.started_ns:
                progress.started_ns = started
            for observer in self._observers:
                observer.begins(self, crew)
            observers = [observer.asked for observer in self._observers]
            current = Pass(self, self._turn, runs, crew, run, interval, whole, observers)
            self._pass = weakref.ref(current)
            return current

    @property
    def _crew(self) -> Crew | None:
        return self._runs.crew

    @property
    def _tracer(self) -> Tracer:
        return self._runs.tracer

    # -- length --------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of chunks per epoch on this rank.

        With ``equal_steps=True``, the number on the rank that has the fewest. In an epoch that resumes from a state,
        the number that was left.

        Raises:
            TypeError: the number depends on the data (a filter, a flat map, a source without a length ...).
        """
        place = self._progress.place if self._running() is not None else self._progress.next_place()
        return length_of(self.plan, place, self._options, self._ledger, self._runs.seed)

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
            "seed": self._runs.seed,
            "world_size": world_size,
            "digest": dict(self._digests()),
            "functions": self.plan.functions(),
            key: part,
        }

    def _digests(self, anew: bool = False) -> dict[str, str]:
        """What a state says of its graph."""
        found = self._digest
        if found is None:
            warn_of_unsaved(self.plan)
        if found is None or anew:
            found = self._digest = self.plan.digests()
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

        self._runs.refuse_closed()
        rank, world_size = self._options.own()
        equal = self._options.equal_steps is not False
        found = read_state(state, allow, self.plan, rank, world_size, equal)
        running = self._running()
        if running is not None:
            running.end("a state was loaded")
        self._runs.rest(found.seed)
        self._runs.ledger.load(found.epoch, found.ledger)
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

        return profile_of(self.plan, self._measure(), *self._ledger.shown(), since)

    def _measure(self) -> Measured:
        """All that was counted so far, for profiles and the tuner."""
        crew, progress = self._crew, self._progress
        if crew is None:
            from pipegraph.measured import Measured

            return Measured()
        first_ns = progress.first_batch_ns
        first_s = (first_ns - progress.started_ns) / 1e9 if first_ns else None
        waits = progress.waits.durations()
        return crew.pass_totals.measure(*progress.totals, waits, first_s, progress.in_pass())

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

    def _show_ranges(self, on: bool) -> None:
        """Stages are ranges in torch.profiler from now on, or no more."""
        if on and self._crew is not None:
            raise GraphError(
                "record: ranges=True begins before the loader's first pass: its workers are open already"
            )
        self._tracer.ranges = on

    def metrics(self) -> str:
        """The loader's profile since its start as OpenMetrics text, for Prometheus to scrape. Thread-safe.

        Raises:
            MissingExtraError: prometheus_client is not installed.
        """
        from pipegraph.profile.openmetrics import render_metrics

        return render_metrics(self.profile())

    def tuning(self) -> Tuning:
        """What the tuner has decided so far, and the settings that it found, as code to paste. Thread-safe.

        Raises:
            GraphError: no stage of this loader is tuned.
        """
        if self._tuner is None:
            raise GraphError(why_not_tuned(self.plan))
        return self._tuner.tuning

    def headspace(self, step: Callable[[Any], Any], *, batches: int = 8, steps: int = 50) -> Headspace:
        """How fast training would be if it never waited for data: the most that tuning this loader can gain.

        Times ``step`` on batches from a second loader of the same graph. Then closes that loader and times ``step`` on
        batches that it has kept in memory. This loader's state does not change, but the effects of ``step`` remain,
        such as training.

        Args:
            step: what training does with one batch. It must wait for the device:
                ``torch.accelerator.synchronize()``.
            batches: number of batches to keep in memory and repeat.
            steps: number of steps to time, with the loader and without.

        Raises:
            GraphError: a number is less than 1.
            DataError: the graph delivered too few batches.
        """
        from pipegraph.profile.headspace import measure_headspace

        options = replace(self._options, epochs=None, equal_steps=False, autotune=False, log_every=None)
        with Loader(self._graph, self._output, options) as other:
            return measure_headspace(_endless(other), other.close, step, batches, steps)

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """End every thread of the pipeline; idempotent. Thread-safe, at any moment of a pass.

        Do not call it in a signal handler, because it waits for locks that a pass holds for moments. Raise an exception
        there instead, such as ``SystemExit``; the ``with`` around the loop then closes the loader.
        """
        self._runs.closed = self._runs.closed or "this loader is closed"
        running = self._running()
        if running is not None:
            running.end("the loader was closed")
        self._runs.close()

    def _forked(self) -> None:
        """In a child that the process has forked: a thread that held one of our locks is not here to release it.

        A loader that has started stays with its threads in the parent. Nothing of its crew is touched here, nor
        freed; its profile is the parent's to give.
        """
        runs = self._runs
        self._turn = concurrency.RLock()
        runs.ledger.forked()
        if runs.crew is None:
            return
        runs.closed = runs.closed or "this loader runs in the process that forked this one"
        running = self._running()
        if running is not None:
            running.end("its threads stayed in the process that forked this one")
            running.turn = self._turn
        self._left_behind, runs.crew = runs.crew, None
        runs.detach()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Loader belongs to the process that made it and cannot be copied or sent to another; send the graph, and "
            "call graph.loader() there"
        )

    def __repr__(self) -> str:
        state = "closed" if self._runs.closed else "running" if self._running() is not None else "waiting"
        return f"<Loader {self._graph.name}: {state}, epoch {self.epoch}, {self._progress.items} delivered>"


def _endless(loader: Loader) -> Iterator[Any]:
    while True:
        delivered = loader._progress.items
        yield from loader
        if loader._progress.items == delivered:
            return
