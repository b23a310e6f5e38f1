"""Compares what the ranks of a loader read: ranks that see different data, or deal it by different orders, seeds or
epochs, skip samples, and read others twice.

Each rank leaves what it sees in the process group's store. A loader that waits for the other ranks anyway (for a seed
drawn by rank 0, or with ``equal_steps=True``) waits there for what all of them see, before the first sample. Any other
loader waits for nobody: it compares with the first rank to begin. A rank that differs fails before its first sample and
leaves a note of it in the store, which the others find when they end or begin a pass.

A comparison that Ctrl-C interrupts is made again by the next pass. Nothing in the store is lost or counted by that; a
collective call would take the other ranks' next one for its own.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pipegraph.capabilities import UserData
from pipegraph.errors import DataError, PipegraphWarning
from pipegraph.planning.plan import Plan

Facts = dict[str, dict[str, str]]
"""What is compared -> stage -> what this rank has of it. Of a rank that failed: the error, under ``"failed"``."""

MIXED = "so that samples would be left out and others come twice"
COMPARED = {
    "data": (
        f"see different data, {MIXED}",
        (
            "Give all ranks the same data; a loader that reads data of its own on each rank is "
            "graph.loader(rank=0, world_size=1), and loaders of different data need graphs of different names"
        ),
    ),
    "order": (f"read in different orders, {MIXED}", "Give all ranks the same order="),
    "start": (
        f"begin at different places, {MIXED}",
        "Load the same state on all ranks, or call set_epoch() with the same number",
    ),
    "seed": (
        "have different seeds, so that what is shuffled or drawn would leave out samples and repeat others",
        "Give the graph the same seed= on all ranks: random numbers differ by sample, not by rank",
    ),
}

_begun = Counter[str]()
"""The loaders that this process has begun to compare: the same loader has the same number on each rank."""


class SameData:
    """The comparison of one loader.

    Args:
        peers: the global ranks that share the data.
        waits: whether this loader's ranks wait for each other anyway, in the same order for all loaders.
    """

    def __init__(self, plan: Plan, rank: int, peers: tuple[int, ...], waits: bool) -> None:
        self._plan, self._rank, self._peers, self._waits = plan, rank, peers, waits
        self._store = _store()
        self._compared = False
        text = json.dumps([peers] if waits else [plan.graph_name, list(plan.stages), peers])
        what = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._key = f"pipegraph/{what}/{_begun[what]}"
        _begun[what] += 1

    def compare(self, seed: int | None, start: str, failure: Exception | None = None) -> None:
        """Compare, at the first call, with the ranks that have begun; later, ask whether one has found a difference.

        Args:
            seed, start: the graph's seed on this rank, and where in the epochs it begins, in words.
            failure: this rank cannot begin; the others learn why. Nothing is raised then.

        Raises:
            DataError: ranks see different data, or would deal it differently; says which rank has what. Of ranks that
                begin at different places and do not wait for each other, it only warns.
        """
        if self._compared:
            self.look()
            return
        facts = _failed(failure) if failure is not None else _seen(self._plan, seed, start)
        found = {self._rank: facts, **(self._all(facts) if self._waits else self._first(facts))}
        if "failed" in facts:
            return
        what, text = difference(found)
        if what == "start" and not self._waits:
            # The other one may be a loader of the same graph that only that rank has, to look at a batch, say.
            warnings.warn(f"{text}, unless only some ranks use this loader", PipegraphWarning, stacklevel=6)
            text = ""
        if text and self._store is not None:
            with suppress(RuntimeError):
                self._store.set(f"{self._key}/differs", text)
        if text:
            raise DataError(text)
        self._compared = True

    def look(self) -> None:
        """Raises DataError if a rank has found, without waiting for this one, that it sees different data."""
        text = ""
        if self._store is not None:
            with suppress(RuntimeError):  # the process group was ended meanwhile
                if self._store.check([f"{self._key}/differs"]):
                    text = self._store.get(f"{self._key}/differs").decode()
        if text:
            raise DataError(text)

    def _all(self, facts: Facts) -> dict[int, Facts]:
        """What each rank sees; waits for those that have not begun."""
        if self._store is None:
            return {}
        import torch.distributed as dist

        self._store.set(f"{self._key}/{dist.get_rank()}", json.dumps([self._rank, facts]))
        return dict(map(json.loads, self._store.multi_get([f"{self._key}/{peer}" for peer in self._peers])))

    def _first(self, facts: Facts) -> dict[int, Facts]:
        """What the first rank that began sees; nothing where the store cannot say."""
        if self._store is not None and "failed" not in facts:
            with suppress(RuntimeError):
                mine = json.dumps([self._rank, facts])
                rank, theirs = json.loads(self._store.compare_set(self._key, "", mine))
                return {rank: theirs}
        return {}


def same_data(
    plan: Plan,
    rank: int,
    world_size: int,
    asked: tuple[int | None, int | None, Any],
    waits: bool,
) -> SameData | None:
    """The comparison of a loader, where there is anybody to compare with.

    Args:
        asked: rank, world size and mesh as the loader was given them.
        waits: see :class:`SameData`.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    given, _, mesh = asked
    peers: tuple[int, ...] = ()  # unknown
    if mesh is not None and given is None:
        if hasattr(mesh, "get_group"):
            peers = tuple(dist.get_process_group_ranks(mesh.get_group()))
    elif dist.get_world_size() == world_size:
        peers = tuple(range(world_size))
    return SameData(plan, rank, peers, waits) if peers else None


def difference(found: Mapping[int, Facts]) -> tuple[str, str]:
    """What differs between ranks, and in words what each has, or why one cannot begin; empty if nothing does. Pure."""
    for rank, facts in sorted(found.items()):
        if "failed" in facts:
            return "failed", f"rank {rank} cannot begin, so the others do not either: {facts['failed']['']}"
    for what, (differ, remedy) in COMPARED.items():
        for name in dict.fromkeys(name for facts in found.values() for name in facts.get(what, {})):
            ranks: dict[str, list[int]] = {}
            for rank, facts in sorted(found.items()):
                ranks.setdefault(facts.get(what, {}).get(name, "nothing"), []).append(rank)
            if len(ranks) > 1:
                said = "; ".join(f"{_ranks(those)}: {text}" for text, those in ranks.items())
                return what, f"stage {name!r}: the ranks {differ}: {said}. {remedy}"
    return "", ""


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _seen(plan: Plan, seed: int | None, start: str) -> Facts:
    facts: Facts = {}
    for stage in plan.described():
        described = stage.spec.operator.can(UserData)
        if described is None:
            continue
        try:
            seen = {"data": described.sees(), "order": described.deals_by()}
        except Exception as error:
            return _failed(error)  # this rank's own pass raises it
        if seen["data"]:
            seen["start"] = start
        if seen["order"]:
            seen["seed"] = str(seed)
        for what, text in seen.items():
            if text:
                facts.setdefault(what, {})[stage.name] = text
    return facts


def _failed(error: Exception) -> Facts:
    return {"failed": {"": f"{type(error).__name__}: {error}"}}


def _store() -> Any:
    from torch.distributed import distributed_c10d

    found = getattr(distributed_c10d, "_get_default_store", None)
    return None if found is None else found()
