"""``Loader``: the object a training loop iterates.

::

    with graph.loader(epochs=90) as loader:
        for epoch in range(loader.epoch, 90):
            for batch in loader: ...

One ``for`` is one pass over one epoch. The loader's methods belong to one thread, the consumer's;
``profile()``, ``state_dict()`` and ``close()`` may be called from any.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from pipegraph import concurrency, forks
from pipegraph.chunk import Chunk
from pipegraph.closing import Closing
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.kinds import kind_of
from pipegraph.engine.run import Run
from pipegraph.engine.runtime import Runtime
from pipegraph.engine.sidecar.isolated import IsolatedRuntime
from pipegraph.engine.stage.ledger import Ledger
from pipegraph.engine.tracing import Events, Tracer
from pipegraph.errors import GraphError, LoaderClosedError, PipegraphWarning
from pipegraph.graph import Graph, Node
from pipegraph.integers import integer
from pipegraph.loader import state as states
from pipegraph.loader.adapt import Wiring, wiring
from pipegraph.loader.ending import finalize
from pipegraph.loader.epoch_pass import Pass, WatchedPass
from pipegraph.loader.equal_steps import check_counts_known, own_group, warn_of_unequal
from pipegraph.loader.given_data import GivenData
from pipegraph.loader.position import Place, Progress
from pipegraph.loader.ranks import agree_on_seed, resolve
from pipegraph.loader.restoring import place_of, read_state
from pipegraph.loader.same_data import SameData, same_data
from pipegraph.machine import available_memory
from pipegraph.measured import Measured
from pipegraph.planning.isolation import isolate as cut
from pipegraph.planning.tunable import tune_all
from pipegraph.units import parse_bytes

if TYPE_CHECKING:
    from pipegraph.profile import Profile
    from pipegraph.profile.headspace import Headspace
    from pipegraph.tuning.decisions import Tuning
    from pipegraph.tuning.tuner import Tuner

logger = logging.getLogger("pipegraph")


@dataclass
class LoaderOptions:
    """What :meth:`pipegraph.Graph.loader` is given, which documents it."""

    epochs: int | None
    memory_limit: Any
    equal_steps: bool | None
    autotune: bool
    isolate: bool
    rank: int | None
    world_size: int | None
    mesh: Any

    def __post_init__(self) -> None:
        if self.epochs is not None:
            self.epochs = integer(self.epochs, "epochs", 1, "must be >= {} or None (endless)")
        if self.equal_steps not in (None, True, False):
            raise GraphError(f"equal_steps must be True, False or None, got {self.equal_steps!r}")
        if self.rank is not None or self.world_size is not None:
            resolve(self.rank, self.world_size)
        if self.memory_limit is not None:
            self.memory_limit = parse_bytes(self.memory_limit, "memory_limit")


class Loader(Closing):
    """A running pipeline. Made by :meth:`pipegraph.Graph.loader`, which documents the arguments."""

    def __init__(self, graph: Graph, output: Node | str | None, options: LoaderOptions) -> None:
        autotune, isolate = options.autotune, options.isolate
        self.plan = tune_all(graph.plan(output)) if autotune else graph.plan(output)
        tuned = [stage.name for stage in self.plan.running if stage.tuned]
        if isolate and (autotune or tuned):
            asked = "autotune=True" if autotune else f"stage {tuned[0]!r}: 'auto'"
            raise GraphError(
                f"{asked} is not available with isolate=True: the tuner does not reach the stages of another process; "
                "set workers= and capacity= there, as a loader without isolate=True finds them"
            )
        self._isolation = cut(self.plan, kind_of) if isolate else None
        self._graph = graph
        self._output = output
        self._options = options
        self._asked = options.rank, options.world_size, options.mesh
        self._seed = graph.seed
        self._runtime: Runtime | None = None
        self._tracer = Tracer()
        self._ledger = Ledger([stage.name for stage in self.plan.running if stage.unordered_above])
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._progress = Progress(self.plan, self._ledger)
        self._given = GivenData(self.plan, isolate)
        self._pass: weakref.ref[Pass] | None = None
        self._group: Any = None  # for the agreement on equal steps
        self._same_data: SameData | None = None
        self._digest: tuple[dict[str, str], Wiring] | None = None
        self._tuner: Tuner | None = None
        if any(stage.tuned for stage in self.plan.running):
            from pipegraph.tuning.tuner import Tuner

            self._tuner = Tuner(self.plan)
        self._closed = ""  # why
        self._turn = concurrency.RLock()  # who begins a pass or takes the next chunk
        self._left_behind: Runtime | None = None  # of the process that forked this one
        forks.notify(self)

    # -- passes --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The running pass's epoch; between passes the next one's."""
        running = self._running()
        if running is not None:
            return running.epoch
        return self._progress.next_place().epoch

    def _running(self) -> Pass | None:
        current = self._pass() if self._pass is not None else None
        return current if current is not None and not current.over else None

    def set_epoch(self, epoch: int) -> None:
        """Choose the number of the next pass; during a pass it holds for the one after.

        Equal to :attr:`epoch` it changes nothing, so that a training loop may call it at the start of every epoch.
        Any other discards prefetched work, and restored work with a warning if nothing of it was delivered yet.
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
        """The next pass. It ends the one before, whose iterator then raises."""
        return self._begin(whole=False)

    def chunks(self) -> Iterator[Chunk]:
        """The next pass, as :class:`~pipegraph.Chunk` objects with keys, positions and epoch."""
        return self._begin(whole=True)

    def _begin(self, whole: bool) -> Pass:
        self._refuse_closed()
        started = perf_counter_ns()
        with self._turn:
            progress = self._progress
            old = self._running()
            place = progress.next_place()
            self._warn_of_dropping(place, 4)
            if old is not None:
                old.end("a new pass over the loader has begun")
            changed = self._given.begins()
            if any(changed):
                self._digest = None  # a state names the length that the data has now
            runtime = self._start()
            runtime.pass_totals.end()  # before the run may be cancelled, which ends its waits
            try:
                run = self._run_from(place, runtime, changed)
            except Exception as error:
                self._compare_data(error)
                raise
            # Known before a signal handler may ask for it, and behind the start, in which sources look for their data
            # so that a close ends the search.
            with suppress(Exception):  # the caller gets the error
                self._digests()
                if not progress.started_ns and self._options.equal_steps is None:
                    warn_of_unequal(self.plan, place.epoch, runtime.world_size)
            self._compare_data()
            interval = runtime.pass_totals.begin(run)
            progress.pass_begins(place, run)
            if not progress.started_ns:
                progress.started_ns = started
            parts = (
                self,
                self._turn,
                runtime,
                run,
                interval,
                progress,
                self._given,
                self._group,
                self._same_data,
                whole,
            )
            if self._tuner is None:
                current = Pass(*parts)
            else:
                self._tuner.begins(self, runtime.staffing)
                current = WatchedPass(self._tuner.asked, *parts)
            self._pass = weakref.ref(current)
            return current

    def _compare_data(self, failure: Exception | None = None) -> None:
        """Raises DataError if other ranks see other data; see :mod:`pipegraph.loader.same_data`."""
        if self._same_data is None:
            return
        try:
            self._same_data.compare(failure)
        except Exception:  # after Ctrl-C the next pass compares
            self.close()
            raise

    def _refuse_closed(self) -> None:
        if self._closed:
            raise LoaderClosedError(f"{self._closed}; make another with graph.loader(...)")

    def _run_from(self, place: Place, runtime: Runtime, changed: tuple[bool, bool]) -> Run:
        """The run there is, where it continues with this place by itself and has not read what has ``changed``."""
        epoch, run = place.epoch, runtime.run
        horizon = inf if self._options.epochs is None else max(epoch, self._options.epochs - 1)
        progress = self._progress
        ahead, any_source = changed
        # A pass that delivered nothing may have begun before.
        stale = run is not None and (any_source if epoch <= run.horizon.begun else ahead)
        if run is not None and not run.over and not stale and progress.continues_to(place):
            progress.broken(failed=False)  # until the pass has begun: an interrupted one does not continue
            run.horizon.raise_to(horizon if place.start.stream is None else epoch, epoch)
            return run
        delivered = progress.idle or not progress.untouched
        try:
            runtime.end_run()  # its workers may still write into the ledger
            progress.broken(failed=False)
            progress.rest_at(place)  # first: a state of the pass before needs what the ledger now forgets
            self._ledger.begin(epoch, place.begun, delivered)
            if place.start.stream is not None:
                horizon = epoch
            elif place.nothing:
                horizon = epoch - 1  # nothing is read
            return runtime.start_run(epoch, horizon, place.resume())
        except Cancelled:
            self.close()
            self._refuse_closed()
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                self.close()
            elif runtime.half_started:  # Ctrl-C: the next pass starts another
                runtime.close()
            raise

    def _start(self) -> Runtime:
        if self._runtime is not None and self._runtime.half_started and not self._closed:
            self._runtime.close()  # interrupted before
            self._runtime = None
        if self._runtime is None:
            rank, world_size = resolve(*self._asked)
            if self._options.equal_steps is None:
                check_counts_known(self.plan, world_size)
            if world_size > 1 and self._options.equal_steps and self._group is None:
                self._group = own_group(world_size)
            waits = self._group is not None or self._seed is None
            self._seed = agree_on_seed(self._seed, rank, world_size)
            if self._same_data is None:  # one that was interrupted is that of the other ranks
                self._same_data = same_data(self.plan, rank, world_size, self._asked, waits)
            limit = self._options.memory_limit or max(1, available_memory() // 2)
            runtime = (
                Runtime(self.plan, limit, self._seed, rank, world_size)
                if self._isolation is None
                else IsolatedRuntime(self._isolation, limit, self._seed, rank, world_size)
            )
            runtime.ledger = self._ledger
            runtime.tracer = self._tracer
            self._runtime = runtime
            # Holds the runtime, never the loader: dropping the last reference to the loader ends its threads.
            self._finalizer = weakref.finalize(self, finalize, runtime)
        # Looked at once the runtime is there: a close() before that has not seen it, one from now on will.
        self._refuse_closed()
        return self._runtime

    # -- length --------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Chunks per epoch on this rank, with ``equal_steps=True`` on the rank that has the fewest; of an epoch that
        resumes from a state, those that were left then.

        Raises:
            TypeError: the data decides (a filter, a flat map, a source without a length ...).
        """
        rank, world_size = resolve(*self._asked)
        progress = self._progress
        place = progress.place if self._running() is not None else progress.next_place()
        if place.nothing:
            return 0
        if place.start.stream is not None or place.later:
            raise TypeError("this loader has no length in this epoch: it continues with other ranks' parts")
        ranks = range(world_size) if self._options.equal_steps else (rank,)
        lengths = [self.plan.steps(self.epoch, each, world_size, place.start.history) for each in ranks]
        if None in lengths:
            names = ", ".join(map(repr, self.plan.unknown_counts()))
            raise TypeError(f"this loader has no length: stages {names} make it depend on the data")
        if place.start.chunks is None:
            raise TypeError(
                "this loader has no length in this epoch: it continues in a graph that was changed"
            )
        return min(length for length in lengths if length is not None) - place.start.chunks

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What has been delivered, as a small JSON-serialisable dict with a fixed set of keys.

        Inside the loop: the rest of the epoch after the chunk delivered last. After the loop:
        a whole epoch. After a ``break``: the rest of the broken pass.

        Thread-safe, at any moment, also from a signal handler: it waits for no lock of the pipeline. What a
        handler meets is the chunk that the loop was given last, which it may not have trained on yet.
        """
        return self._state()

    def _state(self, ended: bool = False) -> dict[str, Any]:
        """The state; ``ended``: as if the pass had run to its end."""
        rank, world_size = resolve(*self._asked)
        part = self._progress.part((rank, world_size), ended)
        digests, wired = self._digests()
        return {
            "version": states.VERSION,
            "seed": self._seed,
            "world_size": world_size,
            "digest": dict(digests),
            "graph": dict(wired),
            "functions": self.plan.carried(),
            f"rank{rank}": part,
        }

    def _digests(self) -> tuple[dict[str, str], Wiring]:
        """What a state says of its graph."""
        if self._digest is None:
            self._digest = self.plan.digests(), wiring(self.plan)
        return self._digest

    def load_state_dict(self, state: Any, allow: Sequence[str] = ()) -> None:
        """Resume from a state: the next pass delivers exactly what followed it.

        Args:
            state: what :meth:`state_dict` returned on this rank (parts of other ranks may be in it too); or the
                list of all ranks' states, with which also a graph that is not elastic resumes at another world
                size: each sample exactly once, in another order.
            allow: names of stages that were changed, added or removed since. What is kept and what begins anew is
                said in a warning; ``docs/resuming.md`` has the rules.

        Raises:
            StateError: the state is of another graph, version or world size; says what differs.
        """
        self._refuse_closed()
        rank, world_size = resolve(*self._asked)
        state, restored = read_state(
            state, allow, self.plan, rank, world_size, self._options.equal_steps is not False
        )
        running = self._running()
        if running is not None:
            running.end("a state was loaded")
        if self._runtime is not None and self._seed != restored.seed:
            self._runtime.close()  # its workers were opened with the seed that was drawn here
            self._runtime = None
        self._seed = restored.seed
        if self._runtime is not None:
            self._runtime.end_run()  # its workers may still write into the ledger
        self._ledger.load(restored.epoch, restored.ledger)
        place = place_of(state, restored, rank, world_size)
        self._progress.broken(failed=False)
        self._progress.rest_at(place)

    # -- looking -------------------------------------------------------------------------------

    def profile(self, since: Profile | None = None) -> Profile:
        """What every stage has done and waited for; also after an error and after ``close()``. Thread-safe.

        Args:
            since: an earlier profile of this loader: only what came after it counts. By default its whole life.

        Raises:
            GraphError: ``since`` is of another graph.
        """
        from pipegraph.profile import profile_of

        return profile_of(self.plan, self._measure(), *self._ledger.shown(), since)

    def _measure(self) -> Measured:
        """All that was counted so far, for profiles and the tuner."""
        runtime, progress = self._runtime, self._progress
        if runtime is None:
            return Measured()
        first_ns = progress.first_batch_ns
        first_s = (first_ns - progress.started_ns) / 1e9 if first_ns else None
        waits = progress.waits.durations()
        return runtime.pass_totals.measure(
            progress.items, progress.samples, waits, first_s, progress.in_pass()
        )

    def _trace(self, on: bool) -> tuple[Events, dict[int, str]]:
        """Trace from now on, or no more; returns the events since then and the names of the workers' threads.

        Raises:
            GraphError: it is traced already.
        """
        if on and self._tracer.on:
            raise GraphError("record: this loader is traced by another recording; one at a time has trace=")
        self._tracer.on = False
        events = self._tracer.take()
        self._tracer.on = on
        return events, {} if self._runtime is None else self._runtime.threads.names()

    def _show_ranges(self, on: bool) -> None:
        """Stages are ranges in torch.profiler from now on, or no more."""
        if on and self._runtime is not None:
            raise GraphError(
                "record: ranges=True begins before the loader's first pass: its workers are open already"
            )
        self._tracer.ranges = on

    def metrics(self) -> str:
        """The profile of the loader's whole life as OpenMetrics text, for Prometheus to scrape. Thread-safe.

        Raises:
            MissingExtraError: prometheus_client is not installed.
        """
        from pipegraph.profile.openmetrics import render_metrics

        return render_metrics(self.profile())

    def tuning(self) -> Tuning:
        """What the tuner has decided so far, and the settings that it found, as code to paste. Thread-safe.

        Raises:
            GraphError: nothing of this loader is tuned.
        """
        if self._tuner is None:
            asked = [stage.name for stage in self.plan.stages.values() if stage.spec.tuned]
            if asked:
                raise GraphError(
                    f"this loader is not tuned: 'auto' cannot be kept in {', '.join(map(repr, asked))}; "
                    "print(graph.plan()) says why"
                )
            raise GraphError(
                "this loader is not tuned: make it with graph.loader(autotune=True), or give stages workers='auto'"
            )
        return self._tuner.tuning

    def headspace(self, step: Callable[[Any], Any], *, batches: int = 8, steps: int = 50) -> Headspace:
        """How fast training would be if it never waited for data: the most that tuning this loader can gain.

        Calls ``step`` on batches of a second loader of the same graph, then with that one closed on kept ones over and
        over. This loader's state is untouched; what ``step`` does, such as training, is done.

        Args:
            step: what training does with one batch. It must wait for the device: ``torch.cuda.synchronize()`` in it.
            batches: how many to keep in memory and replay.
            steps: how many to time, each way.

        Raises:
            GraphError: a number is less than 1.
            DataError: the graph delivered too little.
        """
        from pipegraph.profile.headspace import measure_headspace

        options = replace(self._options, epochs=None, equal_steps=False, autotune=False)
        with Loader(self._graph, self._output, options) as other:
            return measure_headspace(_endless(other), other.close, step, batches, steps)

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """End every thread of the pipeline; idempotent. Thread-safe, at any moment of a pass.

        It waits for locks that a pass holds for moments: a signal handler raises an exception instead, such as
        ``SystemExit``, and leaves closing to the ``with`` around the loop.
        """
        self._closed = self._closed or "this loader is closed"
        running = self._running()
        if running is not None:
            running.end("the loader was closed")
        runtime = self._runtime
        if runtime is not None:
            runtime.pass_totals.end()
            runtime.close()
            if self._finalizer is not None:  # kept so far, should this have been interrupted
                self._finalizer.detach()

    def _forked(self) -> None:
        """In a child that the process has forked: a thread that held one of our locks is not here to release it.

        A loader that has started stays with its threads in the parent. Nothing of its runtime is touched here, nor
        freed; its profile is the parent's to give.
        """
        self._turn = concurrency.RLock()
        self._ledger.forked()
        if self._runtime is None:
            return
        self._closed = self._closed or "this loader runs in the process that forked this one"
        running = self._running()
        if running is not None:
            running.end("its threads stayed in the process that forked this one")
            running.turn = self._turn
        self._left_behind, self._runtime = self._runtime, None
        if self._finalizer is not None:
            self._finalizer.detach()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Loader belongs to the process that made it and cannot be copied or sent to another; send the graph, and "
            "call graph.loader() there"
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._running() is not None else "waiting"
        return f"<Loader {self._graph.name}: {state}, epoch {self.epoch}, {self._progress.items} delivered>"


def _endless(loader: Loader) -> Iterator[Any]:
    while True:
        delivered = loader._progress.items
        yield from loader
        if loader._progress.items == delivered:
            return
