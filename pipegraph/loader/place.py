"""Where a pass is: the cursor of what was delivered, written by the consumer's thread chunk by chunk.

And what a state keeps of samples delivered out of order, and of the rest of an epoch: its JSON.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipegraph.chunk import Chunk, Cursor, Lineage
from pipegraph.engine.stage.cursors import freeze
from pipegraph.engine.stage.restore import Path, Resume
from pipegraph.engine.stage.snapshots import Snapshots
from pipegraph.errors import StateError

if TYPE_CHECKING:
    from pipegraph.loader.state import Restored


VERSION = 2
"""Of states."""

FORGET_EVERY = 64
"""Chunks delivered between two times at which what a restart would not need is forgotten, at least."""

FORGET_SAMPLES = 64
"""This many samples of a chunk count as another chunk, because samples are recorded one by one."""

LineagesByPath = Mapping[Path, Set[Lineage]]
"""Samples delivered beyond the watermark, by the way on which they came."""

Reached = tuple[Cursor, int, int]
"""How far a rank has come in an epoch: the cursor after the last chunk delivered of it, the number of these chunks, and
that of their samples in this place. One value: no state has the one without the others."""


class Delivered:
    """The watermark, and the samples delivered that a restart would read again; no more than stages hold at once.

    One thread writes; any other, also a signal handler inside the writer, may :meth:`read`. So there is no lock:
    what is known is one pair, replaced as a whole, of samples that never change and a log that only grows.
    """

    def __init__(self, reached: Reached, lineages: LineagesByPath) -> None:
        found: dict[Lineage, list[tuple[Path, Lineage]]] = {}  # by (source, position), as they are forgotten
        for path, each in lineages.items():
            for lineage in each:
                found.setdefault(lineage[:2], []).append((path, lineage))
        self._begin(found, reached)

    def _begin(self, found: dict[Lineage, list[tuple[Path, Lineage]]], reached: Reached) -> None:
        log: list[tuple[Reached, Sequence[Lineage], Sequence[Path]]] = [(reached, (), ())]
        self._known = found, log
        self._kept = sum(map(len, found.values()))
        self._chunks = self._samples = 0

    def add(self, chunk: Chunk) -> bool:
        """Count a delivered chunk; says whether it is time to forget some."""
        samples = len(chunk.lineages)
        log = self._known[1]
        _, steps, before = log[-1][0]
        reached = chunk.after, steps + 1, before + samples
        log.append((reached, chunk.lineages, chunk.paths or ((),) * samples))
        self._samples += samples
        self._chunks += 1 + samples // FORGET_SAMPLES
        # Not before there is as much new as was kept: so forgetting costs no more than noting.
        return self._chunks >= FORGET_EVERY and self._samples >= self._kept

    @property
    def reached(self) -> Reached:
        return self._known[1][-1][0]

    def read(self) -> tuple[Reached, dict[Path, set[Lineage]]]:
        """What was delivered, and the samples up to its cursor by path."""
        found, log = self._known
        entries = log.copy()
        lineages: dict[Path, set[Lineage]] = {}
        for several in found.values():
            for path, lineage in several:
                lineages.setdefault(path, set()).add(lineage)
        for _, delivered, paths in entries:
            for lineage, path in zip(delivered, paths, strict=True):
                lineages.setdefault(path, set()).add(lineage)
        return entries[-1][0], lineages

    def forget(self, behind: Iterable[Lineage]) -> None:
        """These (source, position) lie before their source's restart: they will not come again."""
        known, log = self._known
        found = {key: list(several) for key, several in known.items()}
        for _, delivered, paths in log:
            for lineage, path in zip(delivered, paths, strict=True):
                found.setdefault(lineage[:2], []).append((path, lineage))
        for key in behind:
            found.pop(key, None)
        self._begin(found, log[-1][0])


def encode_delivered(lineages: LineagesByPath) -> list[Any]:
    """JSON: per path, runs of the last index under a common prefix."""
    encoded = []
    for path, each in sorted(lineages.items()):
        runs: list[Any] = []
        for lineage in sorted(each):
            if runs and runs[-1][0] == lineage[:-1] and runs[-1][2] == lineage[-1] - 1:
                runs[-1][2] = lineage[-1]
            else:
                runs.append([lineage[:-1], lineage[-1], lineage[-1]])
        encoded.append([list(path), [[list(prefix), low, high] for prefix, low, high in runs]])
    return encoded


def decode_delivered(encoded: Iterable[Any]) -> dict[Path, set[Lineage]]:
    """The inverse of :func:`encode_delivered`."""
    found: dict[Path, set[Lineage]] = {}
    for path, runs in encoded:
        lineages = found.setdefault(tuple(path), set())
        for prefix, low, high in runs:
            head = freeze(prefix)
            lineages.update((*head, last) for last in range(low, high + 1))
    return found


def encode_part(part: Resume) -> list[Any]:
    """JSON of what is left of a rank's part of an epoch, which names the rank."""
    return [part.stream, part.cursor, part.history, encode_delivered(part.delivered)]


def decode_part(encoded: Any) -> Resume:
    """The inverse of :func:`encode_part`."""
    stream, cursor, history, delivered = encoded
    return Resume(freeze(cursor), decode_delivered(delivered), freeze(history), tuple(stream))


def check_state(state: Any) -> None:
    """Raises StateError for what is not the state of a loader, or of another version."""
    if not isinstance(state, Mapping) or "version" not in state or "digest" not in state:
        raise StateError("this is not the state of a loader: it has no 'version' and 'digest'")
    if state["version"] != VERSION:
        raise StateError(
            f"the state has version {state['version']!r}, this pipegraph reads version {VERSION}"
        )


class RowsInDelivery:
    """The rows of one bundle: those that are still in ``remaining`` were not delivered.

    Attributes:
        remaining: ``popleft`` is atomic in any thread, without the GIL too. A pass that is over takes no more.
        count: how many rows there are.
    """

    __slots__ = ("_afters", "_before", "count", "remaining")

    def __init__(self, rows: list[Any], before: Reached, afters: Sequence[Cursor]) -> None:
        self.remaining = deque(rows)
        self.count = len(rows)
        self._before = before
        self._afters = afters

    @property
    def reached(self) -> Reached:
        """The position after the last delivered row."""
        delivered = self.count - len(self.remaining)
        if not delivered:
            return self._before
        _, steps, samples = self._before
        return self._afters[delivered - 1], steps + delivered, samples + delivered


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
        anew: states of the samplers' generators at its start, if none of the run is known yet.
        floors: per source, the step before which ``delivered`` no longer holds that run's samples.
    """

    __slots__ = (
        "_reached anew before dealt delivered epoch failed first floors rows later nothing restored "
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
        self.delivered = Delivered(self._reached, start.delivered) if start.delivered else None
        self.later: tuple[Resume, ...] = ()
        self.nothing = False
        self.restored = False
        self.failed = False
        self.snapshots: Mapping[str, Snapshots] | None = None
        self.anew: Mapping[str, Any] = {}
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

    def take(self, rows: list[Any], afters: Sequence[Cursor]) -> deque[Any]:
        """Deliver these rows next, from the queue that is returned and counts them."""
        self.rows = taken = RowsInDelivery(rows, self.reached, afters)
        return taken.remaining

    @staticmethod
    def restored_to(found: Restored, own: tuple[int, int]) -> Place:
        """Where a state has left off."""
        place = Place.within(found.epoch, found.streams, own, found.steps, found.dealt)
        place.start = replace(place.start, iterators=found.iterators)
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
        return cursor is not None or bool(
            rows or self.start.history or self.start.begun or self.start.stream or self.nothing
        )

    def resume(self) -> Resume:
        """The starting point of a run that resumes from here."""
        (cursor, *_), rows = self.read()
        return replace(self.start, cursor=cursor, delivered=rows)
