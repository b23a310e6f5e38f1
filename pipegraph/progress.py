"""How far a loader's passes have got: what its state describes.

A pass writes it, chunk by chunk, in the consumer's thread; ``state_dict()`` may read it from another.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from pipegraph import state as states
from pipegraph.chunk import Chunk, Cursor
from pipegraph.plan import Plan
from pipegraph.policies import final_policy
from pipegraph.run import Resume, Run
from pipegraph.stage.ledger import Ledger
from pipegraph.stage.restore import restarts

PRUNE_EVERY = 256
"""Chunks delivered between two times at which what a restart would not need is forgotten."""

PRUNE_SAMPLES = 64
"""So many samples of a chunk count as another chunk, for what is kept is kept sample by sample."""


class Place:
    """How far one epoch has been delivered."""

    __slots__ = (
        "cursor",
        "delivered",
        "epoch",
        "floors",
        "history",
        "iterators",
        "later",
        "lock",
        "nothing",
        "run",
        "stream",
    )

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.cursor: Cursor = None
        self.delivered = states.Delivered()
        self.history: states.History = ()
        self.iterators: dict[str, tuple[int, Any]] = {}
        # (rank, world size) whose part of the epoch this is, where it is not this rank's own
        self.stream: tuple[int, int] | None = None
        self.later: tuple[states.Stream, ...] = ()  # other ranks' parts that this one takes over afterwards
        self.run: weakref.ref[Run] | None = None  # that delivers it
        self.floors: dict[str, int] = {}  # per source, the step before which that run's samples are forgotten
        self.nothing = False  # there are more ranks now than parts to go on with
        self.lock = threading.Lock()  # state_dict() may be called from another thread

    @property
    def begun(self) -> bool:
        """Whether a pass from here is something else than a whole epoch of this rank."""
        return self.cursor is not None or bool(self.delivered) or bool(self.history) or bool(self.stream)

    def enter(self, streams: Sequence[states.Stream], own: tuple[int, int]) -> None:
        """Go on with the first of some streams, and the others after it."""
        first = streams[0]
        self.cursor, self.history = first.cursor, first.history
        self.delivered = states.Delivered(first.delivered)
        self.stream = None if first.place == own else first.place
        self.later = tuple(streams[1:])

    def goes_on_in(self, run: Run) -> None:
        """From here on ``run`` delivers it."""
        self.run, self.floors = weakref.ref(run), {}

    def resume(self) -> Resume:
        """Where a run starts that goes on from here."""
        return Resume(self.cursor, self.delivered.rows, self.history, self.stream, self.iterators)


class Progress:
    """The place of the running pass and of the next, and what all passes have delivered.

    Attributes:
        place: what ``state_dict()`` describes.
        upcoming: where the next pass starts; None during a pass.
        ready_for: the epoch with which the current run would go on by itself.
        tracked: every delivered sample is noted, because a stage above finishes in any order.
        counted: delivering a chunk means more than moving the cursor.
    """

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan = plan
        self._ledger = ledger
        self.tracked = plan.stages[plan.output.stage].unordered_above
        self.counted = self.tracked or any(
            final_policy(stage.spec.on_error) != "raise" for stage in plan.running
        )
        self.place = Place(0)
        self.upcoming: Place | None = self.place
        self.ready_for: int | None = None
        self.started_ns = 0
        self.first_batch_ns = 0
        self.items = 0
        self.samples = 0
        self._since_prune = 0

    @property
    def next_epoch(self) -> int:
        """The epoch of the next pass."""
        return self.upcoming.epoch if self.upcoming is not None else self.place.epoch + 1

    def rest_at(self, place: Place) -> None:
        """Between passes: a state taken now, and the next pass, start here."""
        self.place = self.upcoming = place

    def pass_begins(self, place: Place, run: Run) -> None:
        """A pass goes on from this place."""
        place.goes_on_in(run)
        self._ledger.enter(place.epoch)
        self.ready_for = None
        self._since_prune = 0
        self.place, self.upcoming = place, None

    def pass_over(self, finished: bool, epoch: int) -> None:
        """The pass over this epoch ran to its end (``finished``), failed, or was left."""
        if self.upcoming is None:
            self.upcoming = Place(epoch + 1)
        if finished:
            own = self.place.stream is None
            self.ready_for = epoch + 1 if own else None
            self.place = self.upcoming

    def count(self, place: Place, chunk: Chunk, run: Run) -> None:
        """A chunk of a ``counted`` graph was delivered."""
        with place.lock:
            place.cursor = chunk.after
            if self.tracked:
                place.delivered.add(chunk)
            self._since_prune += 1 + len(chunk.rows) // PRUNE_SAMPLES
            if self._since_prune >= PRUNE_EVERY:
                self._since_prune = 0
                self._prune(place, run)

    def part(self, own: tuple[int, int], run: Run | None) -> dict[str, Any]:
        """This rank's part of the state; ``own`` is (rank, world size)."""
        place = self.place
        with place.lock:
            if self.tracked and run is not None and place.run is not None and place.run() is run:
                self._prune(place, run)
            return {
                "epoch": place.epoch,
                "cursor": place.cursor,
                "history": place.history,
                "stream": () if place.nothing else place.stream or own,
                "later": [stream.encode() for stream in place.later],
                "delivered": place.delivered.encode(),
                "ledger": self._ledger_state(place),
                "iterators": self._iterator_states(place, run),
            }

    def _ledger_state(self, place: Place) -> list[Any]:
        if self._ledger.empty:
            return [[], []]
        found = restarts(self._plan, place.cursor)
        return self._ledger.state(place.epoch, found.inputs.get, found.steps)

    def _iterator_states(self, place: Place, run: Run | None) -> dict[str, Any]:
        """``[step, state]`` of each source's iterator from which a restart here would go on."""
        if run is None or place is self.upcoming:
            return {name: list(each) for name, each in place.iterators.items()}
        steps = restarts(self._plan, place.cursor).steps if run.snapshots_taken() else {}
        found = {name: run.stages[name].snapshots.newest(place.epoch, step) for name, step in steps.items()}
        return {name: list(each) for name, each in found.items() if each is not None}

    def _prune(self, place: Place, run: Run) -> None:
        """Forget what a restart from here would not need."""
        found = restarts(self._plan, place.cursor)
        self._ledger.prune(place.epoch, found.inputs.get)
        if not self.tracked:
            return
        for name, step in found.steps.items():
            first = place.floors.get(name)
            if first is None:
                first = run.stages[name].restart.step if place.epoch == run.first_epoch else 0
            if step > first:
                # Asked of the source, because not in every order do positions grow with the steps.
                behind = run.sources[name].positions_of(
                    range(first, step), place.epoch, run.rank, run.world_size
                )
                place.delivered.forget(name, behind)
            place.floors[name] = step
