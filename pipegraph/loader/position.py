"""The position of a loader within its passes, which its state describes.

A pass writes it, chunk by chunk, in the consumer's thread. ``state_dict()`` reads it at any moment, in another
thread or in a signal handler that has interrupted the write. So nothing here has a lock: a place is complete
before it is published (``Progress.place``, one assignment), and what then changes chunk by chunk is one reference.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import length_hint
from typing import Any

from pipegraph.chunk import Chunk, Cursor, Lineage
from pipegraph.contracts import Source
from pipegraph.durations import Stopwatch
from pipegraph.engine.run import Run
from pipegraph.engine.stage.ledger import Ledger
from pipegraph.engine.stage.restore import Resume, restarts
from pipegraph.engine.stage.snapshots import Snapshots
from pipegraph.loader import state as states
from pipegraph.planning.plan import Plan
from pipegraph.policies import final_policy


class Hand:
    """Rows that came together and are given on by an iterator. How many were given follows from what it has left.

    Attributes:
        left: gives them on; any thread's ``next`` on it is one step.
        items, samples: delivered before them.
    """

    __slots__ = ("_afters", "_before", "_count", "_given", "items", "left", "samples")

    def __init__(
        self, rows: list[Any], before: Cursor, afters: Sequence[Cursor], items: int, samples: int
    ) -> None:
        self.left: Any = iter(rows)
        self._count = len(rows)
        self._before = before
        self._afters = afters
        self.items = items
        self.samples = samples
        self._given = 0

    @property
    def given(self) -> int:
        """How many of them were delivered."""
        left = self.left
        return self._given if left is None else self._count - length_hint(left)

    @property
    def cursor(self) -> Cursor:
        """Of the one that was delivered last."""
        given = self.given
        return self._afters[given - 1] if given else self._before

    def close(self) -> None:
        """Those that are left are not delivered, nor held."""
        self._given = self.given
        self.left = None


class Place:
    """How far one epoch has been delivered.

    Attributes:
        hand: which has what is delivered now; None where that is not rows that came together.
        delivered: sample by sample, where a stage above finishes in any order.
        start: the position at which the epoch was entered; its ``stream`` is None for this rank's own part.
        later: other ranks' parts that this one takes over afterwards.
        nothing: there are more ranks now than parts to continue with.
        restored: it comes from a state.
        snapshots: of the sources of the run that resumes from here.
        floors: per source, the step before which that run's samples are forgotten.
    """

    __slots__ = "_cursor delivered epoch floors hand later nothing restored snapshots start".split()

    def __init__(self, epoch: int, start: Resume = Resume()) -> None:  # noqa: B008 (frozen)
        self.epoch = epoch
        self.start = start
        self._cursor = start.cursor
        self.hand: Hand | None = None
        self.delivered = states.Delivered(start.cursor, start.delivered) if start.delivered else None
        self.later: tuple[Resume, ...] = ()
        self.nothing = False
        self.restored = False
        self.snapshots: Mapping[str, Snapshots] | None = None
        self.floors: dict[str, int] = {}

    @property
    def cursor(self) -> Cursor:
        """Of what was delivered last; unused where ``delivered`` is there."""
        hand = self.hand
        return self._cursor if hand is None else hand.cursor

    @cursor.setter
    def cursor(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.hand = None

    @staticmethod
    def within(epoch: int, streams: Sequence[Resume], own: tuple[int, int]) -> Place:
        """Inside an epoch: at the first of some streams, with the others after it; none: nothing is left."""
        first = streams[0] if streams else Resume()
        place = Place(epoch, replace(first, stream=None) if first.stream == own else first)
        place.nothing = not streams
        place.later = tuple(streams[1:])
        return place

    def reached(self) -> tuple[Cursor, dict[Any, set[Lineage]]]:
        """The cursor of what was delivered last, and the samples delivered beyond it."""
        delivered = self.delivered
        return (self.cursor, {}) if delivered is None else delivered.read()

    @property
    def begun(self) -> bool:
        """Whether a pass from here is something else than a whole epoch of this rank."""
        cursor, rows = self.reached()
        return cursor is not None or bool(rows or self.start.history or self.start.stream or self.nothing)

    def resume(self) -> Resume:
        """Where a run starts that resumes from here."""
        cursor, rows = self.reached()
        return replace(self.start, cursor=cursor, delivered=rows)


class Progress:
    """The place of the running pass and of the next, and what all passes have delivered.

    Attributes:
        place: what ``state_dict()`` describes.
        chosen: where the next pass starts, where that does not follow from ``place``.
        idle: no pass has begun since the place was set.
        tracked: every delivered sample is noted, because a stage above finishes in any order.
        counted: delivering a chunk means more than moving the cursor.
        waits: of the training loop, one per chunk.
    """

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan = plan
        self._ledger = ledger
        self.tracked = plan.stages[plan.output.stage].unordered_above
        self.counted = self.tracked or any(
            final_policy(stage.spec.on_error) != "raise" for stage in plan.running
        )
        self.place = Place(0)
        self.chosen: Place | None = self.place
        self.idle = True
        self.started_ns = 0
        self.first_batch_ns = 0
        self._items = self._samples = 0
        self._hand: Hand | None = None
        self.waits = Stopwatch()
        self._passing = 0, 0  # the epoch of the pass that began last, and the chunks before it
        self._items_before = 0  # when the pass began
        self._standing: Place | None = None  # from where the current run continues by itself
        self._since_prune = 0

    # -- what was delivered -------------------------------------------------------------------

    @property
    def items(self) -> int:
        """Chunks delivered by all passes."""
        hand = self._hand
        return self._items if hand is None else hand.items + hand.given

    @property
    def samples(self) -> int:
        """Samples delivered by all passes."""
        hand = self._hand
        return self._samples if hand is None else hand.samples + hand.given

    def delivered(self, samples: int) -> None:
        """A chunk of so many samples was delivered."""
        self._settle()
        self._samples += samples
        self._items += 1

    def take(self, place: Place, rows: list[Any], afters: Sequence[Cursor]) -> Hand:
        """These rows are delivered next, by the hand's iterator; nobody need count them."""
        self._settle()
        hand = Hand(rows, place.cursor, afters, self._items, self._samples)
        place.hand = self._hand = hand
        return hand

    def _settle(self) -> None:
        if self._hand is not None:
            self._items, self._samples = self.items, self.samples
            self._hand = None

    # -- between passes ------------------------------------------------------------------------

    @property
    def untouched(self) -> bool:
        """Whether nothing was delivered since the last pass began: no chunk, no end and no failure."""
        return self.items == self._items_before

    def in_pass(self) -> tuple[int, int]:
        """The epoch of the pass that began last, and how many chunks it has delivered."""
        epoch, before = self._passing
        return epoch, self.items - before

    def next_place(self) -> Place:
        """Where the next pass starts. One that delivered nothing has consumed nothing."""
        if self.chosen is not None:
            return self.chosen
        return self.place if self.untouched else Place(self.place.epoch + 1)

    def rest_at(self, place: Place) -> None:
        """Between passes: a state taken now, and the next pass, start here."""
        if not self.untouched:
            self._standing = None
        self.place = self.chosen = place
        self.idle = True

    def drops_restored(self, chosen: Place) -> bool:
        """Whether resuming at ``chosen`` drops what was restored and not yet delivered."""
        old = self.place
        return old.restored and old is not chosen and (self.idle or self.untouched)

    def continues_to(self, place: Place) -> bool:
        """Whether the current run delivers next what a pass from this place delivers first."""
        standing = self._standing
        if standing is None or not self.untouched:
            return False
        return standing is place or (standing.epoch == place.epoch and not (standing.begun or place.begun))

    def broken(self, failed: bool) -> None:
        """The current run has ended, or will not continue where it stands; ``failed``: a stage's failure was raised."""
        self._standing = None
        if failed:
            self._items_before = -1

    # -- passes --------------------------------------------------------------------------------

    def pass_begins(self, place: Place, run: Run) -> None:
        """A pass resumes from this place, on this run."""
        self._items_before = self.items
        self._passing = place.epoch, self.items
        self._ledger.enter(place.epoch)
        self.enter(place, run)
        self._standing = None if place.nothing else place
        self.chosen = None
        self.idle = False

    def enter(self, place: Place, run: Run) -> None:
        """The pass resumes from this place, on this run."""
        if self.tracked and place.delivered is None:
            place.delivered = states.Delivered(place.cursor, {})
        place.snapshots = run.snapshots
        mine = weakref.ref(self)
        for name, snapshots in place.snapshots.items():
            if isinstance(self._plan.stages[name].operator, Source):
                snapshots.needed = partial(_restart_of, mine, name)
        place.floors = {}
        self._since_prune = 0
        self.place = place

    def restart_of(self, source: str) -> tuple[int, int]:
        """Epoch and step at which a source would restart from here."""
        place = self.place
        delivered = place.delivered
        cursor = place.cursor if delivered is None else delivered.cursor
        return place.epoch, restarts(self._plan, cursor).steps[source]

    def pass_finished(self, place: Place) -> None:
        """The pass over this epoch has run to its end."""
        following = Place(place.epoch + 1)
        following.snapshots = place.snapshots  # of how samplers' generators stand at the epoch's end
        self._items_before = self.items
        self._standing = following if place.start.stream is None and not place.nothing else None
        self.rest_at(self.chosen or following)

    def count(self, place: Place, chunk: Chunk, run: Run) -> None:
        """A chunk of a ``counted`` graph was delivered."""
        if place.delivered is None:
            place.cursor = chunk.after
            self._since_prune += 1 + len(chunk.lineages) // states.FORGET_SAMPLES
            due = self._since_prune >= states.FORGET_EVERY
        else:
            due = place.delivered.add(chunk)
        if due:
            self._since_prune = 0
            self._forget(place, run)

    def following(self, place: Place, own: tuple[int, int]) -> Place:
        """The next of other ranks' parts, once this one is delivered."""
        nobody = (-1, 0)  # this rank's own part came first
        return Place.within(place.epoch, place.later, nobody if place.start.stream is None else own)

    # -- the state -----------------------------------------------------------------------------

    def part(self, own: tuple[int, int]) -> dict[str, Any]:
        """This rank's part of the state; ``own`` is (rank, world size)."""
        place = self.place
        cursor, rows = place.reached()
        return {
            "epoch": place.epoch,
            "cursor": cursor,
            "history": place.start.history,
            "stream": () if place.nothing else place.start.stream or own,
            "later": list(map(states.encode_part, place.later)),
            "delivered": states.encode_delivered(rows),
            "ledger": self._ledger_state(place, cursor),
            "iterators": self._iterator_states(place, cursor),
        }

    def _ledger_state(self, place: Place, cursor: Cursor) -> list[Any]:
        if self._ledger.empty:
            return [[], []]
        found = restarts(self._plan, cursor)
        return self._ledger.state(place.epoch, found.inputs.get, found.steps)

    def _iterator_states(self, place: Place, cursor: Cursor) -> dict[str, Any]:
        """``[step, state]`` of each source's iterator from which a restart here would continue."""
        snapshots = place.snapshots
        if snapshots is None:
            return {name: list(each) for name, each in place.start.iterators.items()}
        steps = restarts(self._plan, cursor).steps if any(each.taken for each in snapshots.values()) else {}
        found = {name: snapshots[name].newest(place.epoch, step) for name, step in steps.items()}
        return {name: list(each) for name, each in found.items() if each is not None}

    def _forget(self, place: Place, run: Run) -> None:
        """Forget what a restart from here would not need."""
        delivered = place.delivered
        found = restarts(self._plan, place.cursor if delivered is None else delivered.cursor)
        self._ledger.prune(place.epoch, found.inputs.get)
        if delivered is None:
            return
        behind: list[Lineage] = []
        for name, step in found.steps.items():
            first = place.floors.get(name)
            if first is None:
                first = run.first_step(name) if place.epoch == run.first_epoch else 0
            source = run.source(name)
            if step > first and source is not None:
                # Asked of the source, because not in every order do positions grow with the steps.
                positions = source.positions_of(range(first, step), place.epoch, run.rank, run.world_size)
                behind += [(name, position) for position in positions]
                place.floors[name] = step
        delivered.forget(behind)


def _restart_of(progress: weakref.ref[Progress], source: str) -> tuple[int, int] | None:
    found = progress()
    return None if found is None else found.restart_of(source)
