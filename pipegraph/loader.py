"""The iterator that a training loop holds: passes, epochs, state.

::

    with graph.loader(epochs=90) as loader:
        for epoch in range(loader.epoch, 90):
            for batch in loader: ...

One ``for`` is one pass over one epoch. The loader's methods belong to one thread, the consumer's;
``profile()``, ``state_dict()`` and ``close()`` may be called from any.
"""

from __future__ import annotations

import _thread
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from pipegraph import state as states
from pipegraph.activity import Cancelled
from pipegraph.agreement import Agreement, Sure, minimum_over, own_group
from pipegraph.chunk import Chunk, Cursor, EndOfEpoch, Failure
from pipegraph.contracts import Source
from pipegraph.errors import GraphError, LoaderClosedError, StateError
from pipegraph.graph import Graph, Node
from pipegraph.machine import available_memory
from pipegraph.policies import final_policy
from pipegraph.ranks import agree_on_seed, resolve
from pipegraph.run import Resume, Run
from pipegraph.runtime import Runtime
from pipegraph.stage.ledger import Ledger
from pipegraph.stage.restore import restarts
from pipegraph.units import parse_bytes

if TYPE_CHECKING:
    from pipegraph.profile import Profile


PRUNE_EVERY = 256
"""Chunks delivered between two times at which what a restart would not need is forgotten."""


class Place:
    """How far one epoch has been delivered."""

    __slots__ = ("cursor", "delivered", "epoch", "history", "iterators", "later", "lock", "nothing", "stream")

    def __init__(
        self,
        epoch: int,
        cursor: Cursor = None,
        delivered: states.Delivered | None = None,
        history: states.History = (),
    ) -> None:
        self.epoch = epoch
        self.cursor = cursor
        self.delivered = delivered or states.Delivered()
        self.history = history
        self.iterators: dict[str, tuple[int, Any]] = {}
        # (rank, world size) whose part of the epoch this is, where it is not this rank's own
        self.stream: tuple[int, int] | None = None
        self.later: tuple[states.Stream, ...] = ()  # other ranks' parts that this one takes over afterwards
        self.nothing = False  # there are more ranks now than parts to go on with
        self.lock = threading.Lock()  # state_dict() may be called from another thread


class Loader:
    """A running pipeline. Made by :meth:`pipegraph.Graph.loader`, which documents the arguments."""

    def __init__(
        self,
        graph: Graph,
        output: Node | str | None = None,
        *,
        epochs: int | None = 1,
        memory_limit: int | str | None = None,
        equal_steps: bool | None = None,
        autotune: bool = False,
        isolate: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Any = None,
    ) -> None:
        if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1):
            raise GraphError(f"epochs must be >= 1 or None (endless), got {epochs!r}")
        if autotune:
            raise GraphError(
                "autotune=True is not available in this version; set workers= and capacity= per stage"
            )
        if isolate:
            raise GraphError("isolate=True is not available in this version")
        if rank is not None or world_size is not None:
            resolve(rank, world_size)
        self.plan = graph.plan(output)
        self._graph = graph
        self._epochs = epochs
        self._memory_limit = None if memory_limit is None else parse_bytes(memory_limit, "memory_limit")
        self._equal_steps = equal_steps
        self._asked = (rank, world_size, mesh)
        self._seed = graph.seed
        self._runtime: Runtime | None = None
        self._ledger = Ledger()
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._tracked = self.plan.stages[self.plan.output.stage].unordered_above
        self._counted = self._tracked or any(
            final_policy(stage.spec.on_error) != "raise" for stage in self.plan.running
        )
        self._place = Place(0)  # what state_dict() describes
        self._upcoming: Place | None = self._place  # where the next pass starts; None during a pass
        self._pass: weakref.ref[Pass] | None = None
        self._ready_for: int | None = None  # the epoch with which the current run would go on
        self._group: Any = None  # for the agreement on equal steps
        self._digest: dict[str, str] | None = None
        self._closed = False
        self._started_ns = 0
        self._first_batch_ns = 0
        self._delivered_items = 0
        self._delivered_samples = 0

    # -- passes --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The running pass's epoch; between passes the next one's."""
        running = self._running()
        if running is not None:
            return running.epoch
        return self._upcoming.epoch if self._upcoming is not None else self._place.epoch + 1

    def _running(self) -> Pass | None:
        current = self._pass() if self._pass is not None else None
        return current if current is not None and not current.over else None

    def set_epoch(self, epoch: int) -> None:
        """Choose the number of the next pass; during a pass it holds for the one after.

        Equal to :attr:`epoch` it changes nothing; any other discards restored and prefetched work.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise GraphError(f"epoch must be >= 0, got {epoch!r}")
        if epoch == self.epoch:
            return
        self._upcoming = Place(epoch)
        if self._running() is None:
            self._place = self._upcoming

    def __iter__(self) -> Iterator[Any]:
        """The next pass. It ends the one before, whose iterator then raises."""
        return self._begin(whole=False)

    def chunks(self) -> Iterator[Chunk]:
        """The next pass, as :class:`~pipegraph.Chunk` objects with keys, positions and epoch."""
        return self._begin(whole=True)

    def _begin(self, whole: bool) -> Pass:
        if self._closed:
            raise LoaderClosedError("this loader is closed; make another with graph.loader(...)")
        started = perf_counter_ns()
        old = self._running()
        place = self._upcoming or Place(self._place.epoch + 1)
        if old is not None:
            old.over = "a new pass over the loader has begun"
        epoch = place.epoch
        restored = (
            place.cursor is not None
            or bool(place.delivered.rows)
            or bool(place.history)
            or bool(place.stream)
        )
        runtime = self._start()
        runtime.tally.end()  # before the run may be cancelled, which ends its waits
        horizon = inf if self._epochs is None else max(epoch, self._epochs - 1)
        run = runtime.run
        if run is not None and self._ready_for == epoch and not restored and run.error is None:
            run.horizon.raise_to(horizon)
        else:
            try:
                runtime.end_run()  # its workers may still write into the ledger
                self._ledger.begin(epoch, restored)
                if place.stream is not None:
                    horizon = epoch
                run = runtime.start_run(epoch, horizon, _resume(place))
            except BaseException:
                self.close()
                raise
        runtime.tally.begin(run)
        self._ready_for = None
        self._place, self._upcoming = place, None
        if not self._started_ns:
            self._started_ns = started
        current = Pass(self, run, epoch, place, whole)
        self._pass = weakref.ref(current)
        return current

    def _start(self) -> Runtime:
        if self._runtime is None:
            rank, world_size = resolve(*self._asked)
            if world_size > 1 and not self.plan.counts_known:
                unknown = ", ".join(map(repr, self.plan.unknown_counts()))
                if self._equal_steps is None:
                    raise GraphError(
                        f"stages {unknown} make the number of steps depend on the data: with {world_size} ranks say "
                        "loader(equal_steps=True) to let the ranks agree, or equal_steps=False if they may differ"
                    )
                if self._equal_steps:
                    self._group = own_group(world_size)
            self._seed = agree_on_seed(self._seed, rank, world_size)
            limit = self._memory_limit if self._memory_limit is not None else max(1, available_memory() // 2)
            runtime = Runtime(self.plan, limit, self._seed, rank, world_size)
            runtime.ledger = self._ledger
            self._runtime = runtime
            # Holds the runtime, never the loader: dropping the last reference to the loader ends its threads.
            self._finalizer = weakref.finalize(self, _finalize, runtime)
        return self._runtime

    def _pass_over(self, finished: bool, epoch: int) -> None:
        """Called by the pass: it ran to its end (``finished``), or failed."""
        if self._runtime is not None:
            self._runtime.tally.end()
        if self._upcoming is None:
            self._upcoming = Place(epoch + 1)
        if finished:
            own = self._place.stream is None
            self._ready_for = epoch + 1 if own else None
            self._place = self._upcoming

    # -- length --------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Chunks per epoch on this rank.

        Raises:
            TypeError: the data decides (a filter, a flat map, a source without a length ...).
        """
        rank, world_size = resolve(*self._asked)
        length = self.plan.lengths(self.epoch, rank, world_size)[self.plan.output.stage]
        if length is None:
            names = ", ".join(map(repr, self.plan.unknown_counts()))
            raise TypeError(f"this loader has no length: stages {names} make it depend on the data")
        return length

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What has been delivered, as a small JSON-serialisable dict with a fixed set of keys.

        Inside the loop: the rest of the epoch after the chunk delivered last. After the loop:
        a whole epoch. After a ``break``: the rest of the broken pass.
        """
        rank, world_size = resolve(*self._asked)
        place = self._place
        with place.lock:
            if self._tracked:
                self._prune(place)
            part = {
                "epoch": place.epoch,
                "cursor": place.cursor,
                "history": place.history,
                "stream": () if place.nothing else place.stream or (rank, world_size),
                "later": [stream.encode() for stream in place.later],
                "delivered": place.delivered.encode(),
                "ledger": self._ledger_state(place),
                "iterators": self._iterator_states(place),
            }
        return {
            "version": states.VERSION,
            "seed": self._seed,
            "world_size": world_size,
            "digest": self._digests(),
            f"rank{rank}": part,
        }

    def _digests(self) -> dict[str, str]:
        if self._digest is None:
            self._digest = self.plan.digests()
        return dict(self._digest)

    def _ledger_state(self, place: Place) -> list[Any]:
        if self._ledger.empty:
            return [[], []]
        found = restarts(self.plan, place.cursor)
        return self._ledger.state(place.epoch, found.inputs.get, found.steps)

    def _iterator_states(self, place: Place) -> dict[str, Any]:
        """``[step, state]`` of each source's iterator from which a restart here would go on."""
        run = self._runtime.run if self._runtime is not None else None
        if run is None or place is self._upcoming:
            return {name: list(each) for name, each in place.iterators.items()}
        steps = restarts(self.plan, place.cursor).steps if run.snapshots_taken() else {}
        found = {name: run.stages[name].snapshots.newest(place.epoch, step) for name, step in steps.items()}
        return {name: list(each) for name, each in found.items() if each is not None}

    def _prune(self, place: Place) -> None:
        """Forget what a restart from here would not need."""
        rank, world_size = place.stream or resolve(*self._asked)
        found = restarts(self.plan, place.cursor)
        self._ledger.prune(place.epoch, found.inputs.get)
        if self._tracked:
            floors = {}
            for stage, step in found.steps.items():
                operator = self.plan.stages[stage].operator
                assert isinstance(operator, Source)
                floors[stage] = operator.position_of(step, place.epoch, rank, world_size)
            place.delivered.prune(floors)

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state: the next pass delivers exactly what followed it.

        Args:
            state: what :meth:`state_dict` returned on this rank (parts of other ranks may be in it too); or the
                list of all ranks' states, with which also a graph that is not elastic goes on at another world
                size: each sample exactly once, in another order.

        Raises:
            StateError: the state is of another graph, version or world size; says what differs.
        """
        if self._closed:
            raise LoaderClosedError("this loader is closed; make another with graph.loader(...)")
        rank, world_size = resolve(*self._asked)
        restored = states.restored(state, rank, world_size, self.plan)
        if self._graph.seed is not None and restored.seed != self._graph.seed:
            raise StateError(
                f"the state was saved with seed={restored.seed}, graph {self._graph.name!r} has seed={self._graph.seed}"
            )
        running = self._running()
        if running is not None:
            running.over = "a state was loaded"
        if self._runtime is not None and self._seed != restored.seed:
            self._runtime.close()  # its workers were opened with the seed that was drawn here
            self._runtime = None
        self._seed = restored.seed
        if self._runtime is not None:
            self._runtime.end_run()  # its workers may still write into the ledger
        self._ledger.load(restored.epoch, restored.ledger)
        self._place = Place(restored.epoch)
        self._place.nothing = not restored.streams
        if restored.streams:
            _enter_stream(self._place, restored.streams, (rank, world_size))
        if isinstance(state, Mapping) and state["world_size"] == world_size:
            found = state[f"rank{rank}"]["iterators"]
            self._place.iterators = {name: (step, snapshot) for name, (step, snapshot) in found.items()}
        self._upcoming = self._place
        self._ready_for = None

    # -- looking -------------------------------------------------------------------------------

    def profile(self) -> Profile:
        """What every stage has done and waited for so far; also after an error and after ``close()``."""
        from pipegraph.profile import profile_of

        return profile_of(self)

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """End every thread of the pipeline; idempotent."""
        self._closed = True
        running = self._running()
        if running is not None:
            running.over = "the loader was closed"
        if self._runtime is not None:
            self._runtime.tally.end()
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
            assert self._runtime is not None
            self._runtime.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._running() is not None else "waiting"
        return f"<Loader {self._graph.name}: {state}, epoch {self.epoch}, {self._delivered_items} delivered>"


def _resume(place: Place) -> Resume:
    return Resume(place.cursor, place.delivered.rows, place.history, place.stream, place.iterators)


def _enter_stream(place: Place, streams: Sequence[states.Stream], own: tuple[int, int]) -> None:
    """Let a place go on with the first of some streams, and the others after it."""
    first = streams[0]
    place.cursor, place.history = first.cursor, first.history
    place.delivered = states.Delivered(first.delivered)
    place.stream = None if first.place == own else first.place
    place.later = tuple(streams[1:])


def _finalize(runtime: Runtime) -> None:
    """The loader is gone, or the interpreter ends."""
    if threading.current_thread() is threading.main_thread():
        runtime.close()
    elif not sys.is_finalizing():
        # The garbage collector runs anywhere, also in one of our own workers that holds a lock of ours.
        _thread.start_new_thread(_close_elsewhere, (runtime,))


def _close_elsewhere(runtime: Runtime) -> None:
    # In a thread that the threading module knows: joining from any other would leave a dummy entry there.
    threading.Thread(target=runtime.close, name="pipegraph-closer", daemon=True).start()


class Pass:
    """One pass over one epoch: the iterator that ``for`` holds."""

    def __init__(self, loader: Loader, run: Run, epoch: int, place: Place, whole: bool) -> None:
        self.loader = loader
        self.epoch = epoch
        self.over = ""
        self._run = run
        self._get = run.terminal.get
        self._release = run.account.release
        self._place = place
        self._whole = whole
        self._tracked = loader._tracked
        self._counted = loader._counted
        self._since_prune = 0
        self._agreement: Agreement | None = None
        self._step = 0
        if loader._group is not None:
            self._agreement = Agreement(minimum_over(loader._group), self._sure, self._await_own)

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if self.over:
            self._refuse()
        if self._place.nothing:
            self._finish()
        try:
            if self._agreement is not None:
                self._agree(self._agreement)
            item = self._get()
            while item.__class__ is not Chunk:
                self._token(item)
                item = self._get()
        except StopIteration:
            raise
        except Cancelled:
            self._cancelled()
        except BaseException:
            item = None  # else the error's traceback would hold the error, and with it the loader
            if not self.over:
                self._fail("it was interrupted")
            raise
        if item.buffers:
            self._release(item.buffers)
        for event in item.ready:
            event.wait()
        place, loader = self._place, self.loader
        if self._counted:
            with place.lock:
                place.cursor = item.after
                if self._tracked:
                    place.delivered.add(item)
                self._since_prune += 1
                if self._since_prune == PRUNE_EVERY:
                    self._since_prune = 0
                    loader._prune(place)
        else:
            place.cursor = item.after
        loader._delivered_items += 1
        loader._delivered_samples += len(item.rows)
        if not loader._first_batch_ns:
            loader._first_batch_ns = perf_counter_ns()
        return item if self._whole else item.data

    def _refuse(self) -> None:
        if self.over == "finished":
            raise StopIteration
        raise LoaderClosedError(f"this pass (epoch {self.epoch}) is over: {self.over}")

    def _sure(self) -> Sure:
        chunks, token = self._run.terminal.ahead()
        ended = isinstance(token, EndOfEpoch) and token.epoch == self.epoch and not self._place.later
        if chunks == 0 and isinstance(token, Failure):
            self._token(self._get())
        return Sure(self._step + chunks, ended)

    def _await_own(self) -> None:
        """Wait for a chunk or the end of this epoch; drops the end of one that was cut short for other ranks' sake."""
        while True:
            self._run.terminal.peek()
            chunks, token = self._run.terminal.ahead()
            if chunks or not isinstance(token, EndOfEpoch) or token.epoch == self.epoch:
                return
            self._get()

    def _agree(self, agreement: Agreement) -> None:
        """Raises StopIteration at the step at which all ranks end."""
        if agreement.may_deliver(self._step):
            self._step += 1
            return
        for chunk in self._run.terminal.discard(self.epoch):
            self._release(chunk.buffers)
        self._finish()

    def _finish(self) -> NoReturn:
        self.over = "finished"
        self.loader._pass_over(True, self.epoch)
        raise StopIteration

    def _token(self, item: Any) -> None:
        """Ends the pass, or returns for a token that means nothing here."""
        if isinstance(item, EndOfEpoch) and item.epoch == self.epoch:
            if not self._place.later:
                self._finish()
            self._take_over()
        if isinstance(item, Failure):
            self._fail("a stage failed")
            try:
                raise item.error
            finally:
                del item

    def _take_over(self) -> None:
        """This part of the epoch is delivered: go on with the next of another rank's."""
        place, runtime = self._place, self.loader._runtime
        assert runtime is not None
        with place.lock:
            own = (runtime.rank, runtime.world_size)
            _enter_stream(place, place.later, (-1, 0) if place.stream is None else own)
        runtime.tally.end()
        run = self._run = runtime.start_run(self.epoch, self.epoch, _resume(place))
        runtime.tally.begin(run)
        self._get, self._release = run.terminal.get, run.account.release

    def _cancelled(self) -> None:
        error, self._run.error = self._run.error, None
        self._fail("a stage failed" if error is not None else "the loader was closed")
        if error is not None:
            try:
                raise error
            finally:
                del error
        raise LoaderClosedError(f"this pass (epoch {self.epoch}) is over: the loader was closed")

    def _fail(self, why: str) -> None:
        self.over = why
        self._run.cancel()
        self.loader._pass_over(False, self.epoch)

    def __del__(self) -> None:
        # After a break. Only flags: the garbage collector may call this in any thread.
        if not self.over:
            self.over = "it was left"
            if self.loader._runtime is not None:
                self.loader._runtime.tally.leave()
            if self.loader._upcoming is None:
                self.loader._upcoming = Place(self.epoch + 1)
