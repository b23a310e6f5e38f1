"""The position of a loader within its passes: what a state records.

The consumer's thread writes it, chunk by chunk. ``state_dict()`` reads it at any moment, from another thread or from a
signal handler that interrupted a write. So there are no locks here: a ``Place`` is complete before it is published (by
one assignment to ``Progress.place``), and each chunk then changes a single reference in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from pipegraph.chunk import Chunk, Lineage
from pipegraph.durations import Stopwatch
from pipegraph.engine.run import Run
from pipegraph.engine.stage.kept import encode_state
from pipegraph.engine.stage.ledger import Ledger
from pipegraph.engine.stage.restore import restart_points
from pipegraph.loader.place import (
    FORGET_EVERY,
    FORGET_SAMPLES,
    Delivered,
    Place,
    encode_delivered,
    encode_part,
)
from pipegraph.planning.plan import Plan


class Progress:
    """The place of the current and the next pass, and the totals of all passes.

    Attributes:
        place: what ``state_dict()`` describes.
        chosen: where the next pass starts, unless that follows from ``place``.
        tracked: whether each delivered sample is recorded, because a stage above runs with ``ordered=False``.
        counted: whether each delivered chunk must go through :meth:`count`, and not only move the cursor.
        waits: durations for which the training loop waited, one per chunk.
    """

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan = plan
        self._ledger = ledger
        self.tracked = plan.stages[plan.output.stage].unordered_above
        self.counted = self.tracked or any(stage.spec.skip is not None for stage in plan.running)
        self._samplers: list[tuple[str, Any]] = [
            (stage.name, stage.operator) for stage in plan.running if stage.draws_resumably
        ]
        self.place = Place(0)
        self.chosen: Place | None = self.place
        self.started_ns = 0
        self.first_batch_ns = 0
        self.waits = Stopwatch()
        self._pass_start = 0, 0  # epoch of the latest pass, and the chunks delivered before it
        self._continues_at: Place | None = None  # where the current run continues without a restart
        self._since_prune = 0

    # -- what was delivered -------------------------------------------------------------------

    @property
    def items(self) -> int:
        return self.totals[0]

    @property
    def totals(self) -> tuple[int, int]:
        """Chunks and samples delivered in all passes."""
        place = self.place
        _, steps, samples = place.reached
        return place.before[0] + steps - place.first, place.before[1] + samples

    def _stand_at(self, place: Place) -> None:
        if place is not self.place:
            place.before = self.totals
            self.place = place

    # -- between passes ------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no pass has begun since the place was set."""
        return self.chosen is self.place

    @property
    def untouched(self) -> bool:
        """Whether the last pass has delivered nothing so far: no chunk, no end and no failure."""
        return self.place.steps == self.place.first and not self.place.failed

    def in_pass(self) -> tuple[int, int]:
        """The epoch of the latest pass, and how many chunks it has delivered."""
        epoch, before = self._pass_start
        return epoch, self.items - before

    def next_place(self) -> Place:
        """Where the next pass starts. A pass that delivered nothing has consumed nothing."""
        if self.chosen is not None:
            return self.chosen
        return self.place if self.untouched else Place(self.place.epoch + 1)

    def rest_at(self, place: Place) -> None:
        """Between passes: set the place at which the next pass starts, also for states taken until then."""
        if not self.untouched:
            self._continues_at = None
        self._stand_at(place)
        self.chosen = place

    def drops_restored(self, chosen: Place) -> bool:
        """Whether resuming at ``chosen`` drops a restored place of which nothing was delivered yet."""
        old = self.place
        return old.restored and old is not chosen and (self.idle or self.untouched)

    def continues_to(self, place: Place) -> bool:
        """Whether the current run, without a restart, delivers next what a pass from this place delivers first."""
        at = self._continues_at
        if at is None or not self.untouched:
            return False
        return at is place or (at.epoch == place.epoch and not (at.begun or place.begun))

    def broken(self, failed: bool) -> None:
        """The current run has ended, or must be restarted; ``failed``: a stage's failure was raised."""
        self._continues_at = None
        if failed:
            self.place.failed = True

    # -- passes --------------------------------------------------------------------------------

    def pass_begins(self, place: Place, run: Run) -> None:
        """A pass begins at this place, on this run."""
        self._pass_start = place.epoch, self.items
        self._ledger.enter(place.epoch)
        self.enter(place, run)
        self._continues_at = None if place.nothing else place
        self.chosen = None

    def enter(self, place: Place, run: Run) -> None:
        """The pass continues at this place, on this run."""
        if self.tracked and place.delivered is None:
            place.delivered = Delivered(place.reached, {})
        place.snapshots = run.snapshots
        mine = weakref.ref(self)
        for name, snapshots in place.snapshots.items():
            if self._plan.stages[name].source is not None:
                snapshots.needed = partial(_restart_of, mine, name)
        place.floors = {}
        self._since_prune = 0
        self._stand_at(place)

    def restart_of(self, source: str) -> tuple[int, int]:
        """Epoch and step at which a source would restart from here."""
        place = self.place
        return place.epoch, restart_points(self._plan, place.reached[0], place.start.begun).steps[source]

    @staticmethod
    def next_epoch(place: Place) -> Place:
        """A whole epoch, the one after this place's."""
        following = Place(place.epoch + 1)
        following.snapshots = place.snapshots  # hold the samplers' generators as of the epoch's end
        return following

    def pass_finished(self, place: Place) -> None:
        """The pass over this epoch has run to its end, or to that of the ranks' common steps."""
        following = self.next_epoch(place)
        # First: however far this comes, the epoch has ended.
        self._stand_at(self.chosen or following)
        self.chosen = self.place
        self._continues_at = following if place.start.stream is None and not place.nothing else None

    def count(self, place: Place, chunk: Chunk, run: Run) -> None:
        """Record a delivered chunk of a ``counted`` graph."""
        if place.delivered is None:
            place.advance(chunk.after, len(chunk.lineages))
            self._since_prune += 1 + len(chunk.lineages) // FORGET_SAMPLES
            due = self._since_prune >= FORGET_EVERY
        else:
            due = place.delivered.add(chunk)
        if due:
            self._since_prune = 0
            self._forget(place, run)

    def following(self, place: Place, own: tuple[int, int]) -> Place:
        """The next part taken over from another rank, once this one is delivered."""
        no_rank = (-1, 0)  # this rank's own part came first
        at = no_rank if place.start.stream is None else own
        return Place.within(place.epoch, place.later, at, place.steps, None)

    # -- the state -----------------------------------------------------------------------------

    def part(self, own: tuple[int, int], ended: bool = False) -> dict[str, Any]:
        """This rank's part; ``own`` is (rank, world size), ``ended`` as if the pass had run to its end."""
        place = self.place
        if ended and not (self.idle or self.untouched):
            place = self.next_epoch(place)
        (cursor, steps, _), rows = place.read()
        found = restart_points(self._plan, cursor, place.start.begun)
        return {
            "epoch": place.epoch,
            "chunks": steps,
            "dealt": place.dealt,
            "cursor": cursor,
            "history": place.start.history,
            "stream": () if place.nothing else place.start.stream or own,
            "later": list(map(encode_part, place.later)),
            "delivered": encode_delivered(rows),
            "ledger": self._ledger.state(place.epoch, {**found.inputs, **found.steps}),
            "iterators": self._iterator_states(place, found.steps),
            "begun": dict(place.start.begun),
            "steps": found.steps,
        }

    def _iterator_states(self, place: Place, steps: Mapping[str, int]) -> dict[str, Any]:
        """``[step, state]`` of each source's iterator from which a restart at these steps would continue."""
        snapshots = place.snapshots
        found: Mapping[str, tuple[int, Any] | None]
        if snapshots is None:
            anew, found = place.anew or self.beginnings_of(place), place.start.iterators
        else:
            anew = place.anew
            found = {name: snapshots[name].newest(place.epoch, step) for name, step in steps.items()}
        return {**anew, **{name: list(each) for name, each in found.items() if each is not None}}

    def beginnings_of(self, place: Place) -> dict[str, Any]:
        """``[0, state]`` of the samplers' generators where a pass that begins anew begins. No pass runs."""
        found: dict[str, Any] = {}
        for name, source in () if place.begun else self._samplers:
            if name not in place.start.iterators and (taken := source.between()) is not None:
                found[name] = [0, encode_state(taken, name)]
        return found

    def _forget(self, place: Place, run: Run) -> None:
        """Drop records that a restart from here would not need."""
        delivered = place.delivered
        found = restart_points(self._plan, place.reached[0], place.start.begun)
        self._ledger.prune(place.epoch, {**found.inputs, **found.steps})
        if delivered is None:
            return
        behind: list[Lineage] = []
        for name, step in found.steps.items():
            first = place.floors.get(name)
            if first is None:
                first = run.stages[name].restart.step if place.epoch == run.first_epoch else 0
            if step > first:
                # Ask the source: in some orders positions do not increase with the steps.
                positions = run.positions_of(name, range(first, step), place.epoch)
                behind += [(name, position) for position in positions]
                place.floors[name] = step
        delivered.forget(behind)


def _restart_of(progress: weakref.ref[Progress], source: str) -> tuple[int, int] | None:
    found = progress()
    return None if found is None else found.restart_of(source)
