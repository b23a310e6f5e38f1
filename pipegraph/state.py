"""What a loader's state looks like, and the bookkeeping of samples below completion-order stages. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipegraph.chunk import Chunk, Lineage
from pipegraph.errors import StateError
from pipegraph.stage.restore import Path, freeze

VERSION = 1


class Delivered:
    """Lineages delivered beyond the watermark, per path; small, because it is pruned as that advances."""

    PRUNE_EVERY = 256

    def __init__(self, rows: Mapping[Path, set[Lineage]] | None = None) -> None:
        self.rows: dict[Path, set[Lineage]] = {path: set(found) for path, found in (rows or {}).items()}
        self._since_prune = 0

    def add(self, chunk: Chunk) -> bool:
        """Count a delivered chunk; True when it is time to :meth:`prune`."""
        paths = chunk.paths or ((),) * len(chunk.rows)
        for row, path in zip(chunk.rows, paths, strict=True):
            self.rows.setdefault(path, set()).add(row)
        self._since_prune += 1
        return self._since_prune >= self.PRUNE_EVERY

    def prune(self, floors: Mapping[str, int]) -> None:
        """Forget samples at positions below their source's restart: they will not come again."""
        self._since_prune = 0
        for path, rows in list(self.rows.items()):
            kept = {row for row in rows if row[1] >= floors.get(row[0], 0)}
            if kept:
                self.rows[path] = kept
            else:
                del self.rows[path]

    def encode(self) -> list[Any]:
        """JSON: per path, runs of the last index under a common prefix."""
        encoded = []
        for path, rows in sorted(self.rows.items()):
            runs: list[Any] = []
            for row in sorted(rows):
                if runs and runs[-1][0] == row[:-1] and runs[-1][2] == row[-1] - 1:
                    runs[-1][2] = row[-1]
                else:
                    runs.append([row[:-1], row[-1], row[-1]])
            encoded.append([list(path), [[list(prefix), low, high] for prefix, low, high in runs]])
        return encoded


def decode_delivered(encoded: Iterable[Any]) -> dict[Path, set[Lineage]]:
    """The inverse of :meth:`Delivered.encode`."""
    found: dict[Path, set[Lineage]] = {}
    for path, runs in encoded:
        rows = found.setdefault(tuple(path), set())
        for prefix, low, high in runs:
            head = freeze(prefix)
            rows.update((*head, last) for last in range(low, high + 1))
    return found


def check_state(state: Any, rank: int, world_size: int) -> Mapping[str, Any]:
    """This rank's part of a state.

    Raises:
        StateError: it is not a loader's state, of another version, or of another world size.
    """
    if not isinstance(state, Mapping) or "version" not in state or "digest" not in state:
        raise StateError("this is not the state of a loader: it has no 'version' and 'digest'")
    if state["version"] != VERSION:
        raise StateError(f"the state has version {state['version']}, this pipegraph reads version {VERSION}")
    saved = state["world_size"]
    if saved != world_size:
        raise StateError(
            f"the state was saved with world_size={saved}, this loader runs with {world_size}; "
            "resuming at another world size is not available in this version"
        )
    part = state.get(f"rank{rank}")
    if not isinstance(part, Mapping):
        ranks = ", ".join(key for key in state if key.startswith("rank"))
        raise StateError(f"the state has no part for rank {rank}; it has: {ranks or 'none'}")
    return part
