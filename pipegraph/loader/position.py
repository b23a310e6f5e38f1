"""The position of a loader within its passes: what a state records.

The consumer's thread writes it, chunk by chunk. ``state_dict()`` reads it at any moment, from another thread or from a
signal handler that interrupted a write. So there are no locks here: a ``Place`` is complete before it is published (by
one assignment to ``Progress.place``), and each chunk then changes a single reference in it.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pipegraph.capabilities import Resumable, UserData
from pipegraph.chunk import Chunk, Cursor, Lineage
from pipegraph.durations import Stopwatch
from pipegraph.engine.run import Run
from pipegraph.engine.stage.kept import encode_state
from pipegraph.engine.stage.ledger import Ledger
from pipegraph.engine.stage.restore import Resume, restarts
from pipegraph.engine.stage.snapshots import Snapshots
from pipegraph.errors import PipegraphWarning
from pipegraph.loader import delivered as record
from pipegraph.loader.delivered import Reached
from pipegraph.planning.plan import Plan

if TYPE_CHECKING:
    from pipegraph.loader.state import Restored

LEFT_EARLY = (
    "stage {!r}: a pass over its iterable, or its sampler, was left before its end (a break, a failure, or another "
    "loader still reads it), so the loader's state cannot say where the next pass begins: a resume from it begins "
    "where the given object does. Save the state inside the loop, or after a pass that has ended"
)


class RowsInDelivery:
    """The rows of one bundle: those that are still in ``remaining`` were not delivered.

    Attributes:
        remaining: ``popleft`` is atomic in any thread, without the GIL too. None once closed.
        count: how many rows there are.
    """

    __slots__ = ("_afters", "_before", "_delivered", "count", "remaining")

    def __init__(self, rows: list[Any], before: Reached, afters: Sequence[Cursor]) -> None:
        self.remaining: Any = deque(rows)
        self.count = len(rows)
        self._before = before
        self._afters = afters
        self._delivered = 0

    @property
    def delivered(self) -> int:
        """How many of the rows were delivered."""
        remaining = self.remaining
        return self._delivered if remaining is None else self.count - len(remaining)

    @property
    def reached(self) -> Reached:
        """The position after the last delivered row."""
        delivered = self.delivered
        if not delivered:
            return self._before
        _, steps, samples = self._before
        return self._afters[delivered - 1], steps + delivered, samples + delivered

    def close(self) -> None:
        """Drop the remaining rows; they are not delivered."""
        self._delivered = self.delivered
        self.remaining = None


class Place:
    """A position in one epoch: what of it has been delivered.

    Attributes:
        rows: the bundle in delivery; None if chunks are delivered one by one.
        delivered: the delivered samples, if a stage above runs with ``ordered=False``; else None.
        start: the position at which the epoch was entered; its ``stream`` is None for this rank's own part.
        later: parts of other ranks that this rank delivers afterwards.
        nothing: this rank has no part: there are more ranks than parts to resume.
        restored: whether it comes from a state.
        failed: whether the pass over it has ended with a stage's failure.
        first: chunks of the epoch that this rank had delivered when it entered here.
        dealt: chunks of the epoch that it had delivered when what was left was dealt to the ranks that there are; None
            where the plan's numbers say nothing of what is left: the graph was changed, or others' parts are continued.
        before: chunks and samples that the loader had delivered when it entered here.
        snapshots: of the sources' iterators, from the run that resumes here.
        anew: states of the sources' iterators at its start, if none of the run is known yet; None where that is not
            known because a pass was left early.
        beginnings: of the sources' iterators, at the start of the epoch, as a state has them.
        floors: per source, the step before which ``delivered`` no longer holds that run's samples.
    """

    __slots__ = (
        "_reached anew before beginnings dealt delivered epoch failed first floors rows later nothing restored "
        "snapshots start"
    ).split()

    def __init__(
        self,
        epoch: int,
        start: Resume = Resume(),  # noqa: B008 (frozen)
        steps: int = 0,
        dealt: int | None = 0,
    ) -> None:
        self.epoch = epoch
        self.start = start
        self.first = steps
        self.dealt = dealt
        self.before = 0, 0
        self._reached: Reached = start.cursor, steps, 0
        self.rows: RowsInDelivery | None = None
        self.delivered = record.Delivered(self._reached, start.delivered) if start.delivered else None
        self.later: tuple[Resume, ...] = ()
        self.nothing = False
        self.restored = False
        self.failed = False
        self.snapshots: Mapping[str, Snapshots] | None = None
        self.anew: Mapping[str, Any] = {}
        self.beginnings: Mapping[str, Any] = {}
        self.floors: dict[str, int] = {}

    @property
    def words(self) -> str:
        """Where it is, in words that are equal on ranks that share the epochs: their states may differ in steps."""
        if not self.restored:
            return f"epoch {self.epoch}"
        ranks = ", then ".join(str(ranks) for ranks, _ in self.start.history)
        return "a state" + (f" of {ranks} ranks" if ranks else "")

    @property
    def reached(self) -> Reached:
        """What was delivered of the epoch."""
        if self.delivered is not None:
            return self.delivered.reached
        rows = self.rows
        return self._reached if rows is None else rows.reached

    @property
    def steps(self) -> int:
        """How many chunks of the epoch this rank has delivered, also at other world sizes and in the graph before."""
        return self.reached[1]

    def advance(self, cursor: Cursor, samples: int) -> None:
        """Another chunk was delivered; not used if ``delivered`` is set."""
        _, steps, before = self._reached
        if self.rows is not None:  # all of them: they come first
            steps, before = steps + self.rows.count, before + self.rows.count
        self._reached = cursor, steps + 1, before + samples
        self.rows = None

    def take(self, rows: list[Any], afters: Sequence[Cursor]) -> RowsInDelivery:
        """Deliver these rows next, from ``remaining``, which also counts them."""
        self.rows = taken = RowsInDelivery(rows, self.reached, afters)
        return taken

    @staticmethod
    def restored_to(found: Restored, own: tuple[int, int]) -> Place:
        """Where a state has left off."""
        place = Place.within(found.epoch, found.streams, own, found.steps, found.dealt)
        place.start = replace(place.start, iterators=found.iterators)
        place.beginnings = found.beginnings
        place.restored = True
        return place

    @staticmethod
    def within(
        epoch: int, streams: Sequence[Resume], own: tuple[int, int], steps: int, dealt: int | None
    ) -> Place:
        """Inside an epoch, at the first of some streams, with the others to follow; without streams nothing is left."""
        first = streams[0] if streams else Resume()
        place = Place(epoch, replace(first, stream=None) if first.stream == own else first, steps, dealt)
        place.nothing = not streams
        place.later = tuple(streams[1:])
        return place

    def read(self) -> tuple[Reached, dict[Any, set[Lineage]]]:
        """What was delivered of the epoch, and the samples delivered beyond its cursor."""
        delivered = self.delivered
        return (self.reached, {}) if delivered is None else delivered.read()

    @property
    def begun(self) -> bool:
        """Whether a pass from here delivers anything other than a whole epoch of this rank."""
        (cursor, *_), rows = self.read()
        return cursor is not None or bool(rows or self.start.history or self.start.stream or self.nothing)

    def resume(self) -> Resume:
        """The starting point of a run that resumes from here."""
        (cursor, *_), rows = self.read()
        return replace(self.start, cursor=cursor, delivered=rows)


class Progress:
    """The place of the current and the next pass, and the totals of all passes.

    Attributes:
        place: what ``state_dict()`` describes.
        chosen: where the next pass starts, unless that follows from ``place``.
        tracked: whether each delivered sample is recorded, because a stage above runs with ``ordered=False``.
        counted: whether each delivered chunk must go through :meth:`count`, and not only move the cursor.
        waits: durations for which the training loop waited, one per chunk.
    """

    def __init__(self, plan: Plan, ledger: Ledger, isolated: bool = False) -> None:
        self._plan = plan
        self._ledger = ledger
        self.tracked = plan.stages[plan.output.stage].unordered_above
        self.counted = self.tracked or any(not stage.spec.outcome.ends for stage in plan.running)
        self._asked = [
            (stage.name, stage.source, source)
            for stage in plan.running
            if stage.source is not None and (source := stage.source.can(Resumable)) is not None
        ]
        # Those of which another process reads a copy, made when it starts.
        self._elsewhere = {
            stage.name
            for stage in plan.running
            if stage.source is not None
            and (isolated or not (stage.backend.in_trainer or stage.source.random_access))
        }
        self._unread = True  # whether the copies are as the objects here
        self._stood: dict[str, Any] = {}  # by source, what the copies' next pass begins with
        self._warned: set[str] = set()
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
            place.delivered = record.Delivered(place.reached, {})
        place.snapshots = run.snapshots
        self.read_from(None)
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
        return place.epoch, restarts(self._plan, place.reached[0]).steps[source]

    @staticmethod
    def next_epoch(place: Place) -> Place:
        """A whole epoch, the one after this place's."""
        following = Place(place.epoch + 1)
        following.snapshots = place.snapshots  # hold the samplers' generators as of the epoch's end
        return following

    def pass_finished(self, place: Place) -> None:
        """The pass over this epoch has run to its end."""
        following = self.next_epoch(place)
        if place.snapshots is not None:
            stood = {name: place.snapshots[name].newest(following.epoch, 0) for name in self._elsewhere}
            self._stood = {name: found[1] for name, found in stood.items() if found is not None}
        # First: however far this comes, the epoch has ended.
        self._stand_at(self.chosen or following)
        self.chosen = self.place
        self._continues_at = following if place.start.stream is None and not place.nothing else None

    def count(self, place: Place, chunk: Chunk, run: Run) -> None:
        """Record a delivered chunk of a ``counted`` graph."""
        if place.delivered is None:
            place.advance(chunk.after, len(chunk.lineages))
            self._since_prune += 1 + len(chunk.lineages) // record.FORGET_SAMPLES
            due = self._since_prune >= record.FORGET_EVERY
        else:
            due = place.delivered.add(chunk)
        if due:
            self._since_prune = 0
            self._forget(place, run)

    def following(self, place: Place, own: tuple[int, int]) -> Place:
        """The next part taken over from another rank, once this one is delivered."""
        no_rank = (-1, 0)  # this rank's own part came first
        at = no_rank if place.start.stream is None else own
        found = Place.within(place.epoch, place.later, at, place.steps, None)
        sources = [
            stage.name for stage in self._plan.running if stage.source is not None and stage.source.resizable
        ]
        found.beginnings = _beginnings(place, sources)
        found.start = replace(
            found.start, iterators={name: (0, each) for name, each in found.beginnings.items()}
        )
        return found

    # -- the state -----------------------------------------------------------------------------

    def part(self, own: tuple[int, int], ended: bool = False) -> dict[str, Any]:
        """This rank's part; ``own`` is (rank, world size), ``ended`` as if the pass had run to its end."""
        place = self.place
        if ended and not (self.idle or self.untouched):
            place = self.next_epoch(place)
        (cursor, steps, _), rows = place.read()
        iterators = self._iterator_states(place, cursor)
        return {
            "epoch": place.epoch,
            "chunks": steps,
            "dealt": place.dealt,
            "cursor": cursor,
            "history": place.start.history,
            "stream": () if place.nothing else place.start.stream or own,
            "later": list(map(record.encode_part, place.later)),
            "delivered": record.encode_delivered(rows),
            "ledger": self._ledger_state(place, cursor),
            "iterators": iterators,
            "beginnings": _beginnings(place, [name for name, (step, _) in iterators.items() if step]),
        }

    def _ledger_state(self, place: Place, cursor: Cursor) -> list[Any]:
        if self._ledger.empty:
            return [[], []]
        found = restarts(self._plan, cursor)
        return self._ledger.state(place.epoch, found.inputs.get, found.steps)

    def _iterator_states(self, place: Place, cursor: Cursor) -> dict[str, Any]:
        """``[step, state]`` of each source's iterator from which a restart here would continue."""
        snapshots = place.snapshots
        found: Mapping[str, tuple[int, Any] | None]
        if snapshots is None:
            anew, found = place.anew or self._beginnings_of(place), place.start.iterators
        else:
            known = any(each.taken for each in snapshots.values())
            steps = restarts(self._plan, cursor).steps if known or place.anew else {}
            anew = place.anew
            found = {name: snapshots[name].newest(place.epoch, step) for name, step in steps.items()}
        taken = {**anew, **{name: list(each) for name, each in found.items() if each is not None}}
        for name in taken.keys() - self._warned:
            if taken[name] is None:
                self._warned.add(name)
                warnings.warn(LEFT_EARLY.format(name), PipegraphWarning, stacklevel=6)
        return {name: each for name, each in taken.items() if each is not None}

    def read_from(self, place: Place | None) -> None:
        """The sources are read from now on: at this place, if they begin anew. No pass runs."""
        if place is not None:
            place.anew = self._beginnings_of(place)
        self._unread, self._stood = False, {}

    def copied_anew(self) -> None:
        """Other processes will start with new copies of the sources."""
        self._unread, self._stood = True, {}

    def _beginnings_of(self, place: Place) -> dict[str, Any]:
        """``[0, state]`` of the sources' iterators where a pass that begins anew begins; None where that is not known
        because a pass was left early. No pass runs."""
        found: dict[str, Any] = {}
        for name, source, resumable in () if place.begun else self._asked:
            if name in place.start.iterators:
                continue
            taken = resumable.between()
            if self._unread or name not in self._elsewhere:
                if taken is not None:
                    found[name] = [0, encode_state(taken, name)]
                elif resumable.left_early():
                    found[name] = None
            elif name in self._stood:
                found[name] = [0, self._stood[name]]
            elif taken is not None:
                described = source.can(UserData)
                if described is None or described.reads_once() is None:
                    found[name] = None
        return found

    def _forget(self, place: Place, run: Run) -> None:
        """Drop records that a restart from here would not need."""
        delivered = place.delivered
        found = restarts(self._plan, place.reached[0])
        self._ledger.prune(place.epoch, found.inputs.get)
        if delivered is None:
            return
        behind: list[Lineage] = []
        for name, step in found.steps.items():
            first = place.floors.get(name)
            if first is None:
                first = run.first_step(name) if place.epoch == run.first_epoch else 0
            if step > first:
                # Ask the source: in some orders positions do not increase with the steps.
                positions = run.positions_of(name, range(first, step), place.epoch)
                behind += [(name, position) for position in positions]
                place.floors[name] = step
        delivered.forget(behind)


def _beginnings(place: Place, names: Sequence[str]) -> dict[str, Any]:
    """The states of these sources' iterators at the start of the epoch, where they are known."""
    snapshots, found = place.snapshots or {}, dict(place.beginnings)
    for name in names:
        each = snapshots[name].newest(place.epoch, 0) if name in snapshots else None
        each = each or place.anew.get(name)
        if each is not None:
            found[name] = each[1]
    return {name: found[name] for name in names if name in found}


def _restart_of(progress: weakref.ref[Progress], source: str) -> tuple[int, int] | None:
    found = progress()
    return None if found is None else found.restart_of(source)
