"""What a loader's state looks like, and the bookkeeping of samples below completion-order stages. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipegraph.chunk import Chunk, Cursor, Lineage
from pipegraph.errors import StateError
from pipegraph.plan import Plan
from pipegraph.stage.cursors import freeze
from pipegraph.stage.restore import Path

VERSION = 1

History = tuple[tuple[int, int], ...]
"""``(world size, samples per rank)`` consumed of an epoch so far, at each world size it has had."""


class Delivered:
    """Lineages delivered beyond the watermark, per path; small, because it is pruned as that advances."""

    def __init__(self, rows: Mapping[Path, set[Lineage]] | None = None) -> None:
        self.rows: dict[Path, set[Lineage]] = {path: set(found) for path, found in (rows or {}).items()}

    def add(self, chunk: Chunk) -> None:
        """Count a delivered chunk."""
        paths = chunk.paths or ((),) * len(chunk.rows)
        for row, path in zip(chunk.rows, paths, strict=True):
            self.rows.setdefault(path, set()).add(row)

    def prune(self, floors: Mapping[str, int]) -> None:
        """Forget samples at positions below their source's restart: they will not come again."""
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


def part_for(state: Any, rank: int, world_size: int, plan: Plan) -> tuple[Mapping[str, Any], History]:
    """The part of a state that this rank goes on from, and what was consumed of the epoch at other world sizes.

    Raises:
        StateError: it is not a loader's state, of another version, or of a world size that this graph
            cannot go on from; says which stage is in the way.
    """
    if not isinstance(state, Mapping) or "version" not in state or "digest" not in state:
        raise StateError("this is not the state of a loader: it has no 'version' and 'digest'")
    if state["version"] != VERSION:
        raise StateError(f"the state has version {state['version']}, this pipegraph reads version {VERSION}")
    parts = {key: part for key, part in state.items() if key.startswith("rank") and isinstance(part, Mapping)}
    saved = state["world_size"]
    if saved == world_size:
        if f"rank{rank}" not in parts:
            raise StateError(f"the state has no part for rank {rank}; it has: {', '.join(parts) or 'none'}")
        part = parts[f"rank{rank}"]
        return part, freeze(part["history"])
    if not parts:
        raise StateError("the state has no part of any rank")
    part = parts.get(f"rank{rank}") or next(iter(parts.values()))
    if part["cursor"] is None and not part["history"]:
        return part, ()  # a whole epoch: there is nothing to deal anew
    if not plan.elastic:
        raise StateError(
            f"the state was saved with world_size={saved}, this loader runs with {world_size}, and the graph can only go "
            f"on at the same size because of stages {', '.join(map(repr, plan.inelastic))}"
        )
    consumed = {key: steps_consumed(plan, freeze(each["cursor"])) for key, each in parts.items()}
    if len(set(consumed.values())) > 1:
        raise StateError(
            "the ranks of this state stand at different steps ("
            + ", ".join(f"{key} at {steps}" for key, steps in consumed.items())
            + "); save all ranks at the same step to go on at another world size"
        )
    steps = next(iter(consumed.values()))
    history = freeze(part["history"])
    return part, (*history, (saved, steps)) if steps else history


def steps_consumed(plan: Plan, cursor: Cursor) -> int:
    """How many samples of its epoch a rank of an elastic graph has consumed, for a cursor of the output."""
    stage, samples = plan.stages[plan.output.stage], 0
    while stage.upstream:
        if cursor is None:
            return 0
        if stage.operator.kind == "expand":
            cursor, done = cursor
            samples += done
        stage = plan.stages[stage.upstream[0].stage]
    return samples + (0 if cursor is None else int(cursor))
