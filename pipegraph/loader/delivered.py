"""What a state keeps of samples delivered out of order, and of the rest of an epoch: its JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from pipegraph.chunk import Chunk, Cursor, Lineage
from pipegraph.engine.stage.cursors import freeze
from pipegraph.engine.stage.restore import Path, Resume
from pipegraph.errors import StateError

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
