"""Compares what the ranks of a loader read: ranks that see different data, or deal it by different orders, seeds or
epochs, skip samples, and read others twice.

Each rank leaves a line in the process group's store. A loader that waits for the other ranks anyway (for a seed drawn
by rank 0, or with ``equal_steps=True``) waits there for all of them, before the first sample. Any other loader waits
for nobody: it compares with the first rank to begin. A comparison that Ctrl-C interrupts is made again by the next
pass.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pipegraph.errors import DataError
from pipegraph.loader.digests import described
from pipegraph.planning.plan import Plan

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
        self._compared = False
        text = json.dumps([peers] if waits else [plan.graph_name, list(plan.stages), peers])
        what = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._key = f"pipegraph/{what}/{_begun[what]}"
        _begun[what] += 1

    def compare(self, seed: int | None, start: str) -> None:
        """Compare with the ranks that have begun, at the first call.

        Args:
            seed, start: the graph's seed on this rank, and where in the epochs it begins, in words.

        Raises:
            DataError: ranks see different data, or would deal it differently; says which rank has what.
        """
        store = _store()
        if self._compared or store is None:
            return
        # The first rank to begin may have another loader of this graph, to look at a batch: at any place.
        mine = _seen(self._plan, seed, start if self._waits else "")
        found = {self._rank: mine}
        if self._waits:
            import torch.distributed as dist

            store.set(f"{self._key}/{dist.get_rank()}", json.dumps([self._rank, mine]))
            found.update(map(json.loads, store.multi_get([f"{self._key}/{peer}" for peer in self._peers])))
        else:
            with suppress(RuntimeError):  # the process group was ended meanwhile
                rank, theirs = json.loads(store.compare_set(self._key, "", json.dumps([self._rank, mine])))
                found[rank] = theirs
        if text := difference(found):
            raise DataError(text)
        self._compared = True


def same_data(
    plan: Plan, rank: int, world_size: int, asked: tuple[int | None, int | None, Any], waits: bool
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


def difference(found: Mapping[int, str]) -> str:
    """In words what each rank has, where they differ; else nothing. Pure."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(found.items()):
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1:
        return ""
    said = "; ".join(f"{_ranks(those)}: {text or 'nothing'}" for text, those in ranks.items())
    return (
        "the ranks read different data, or deal it differently, so that samples would be left out and others come "
        f"twice: {said}. Give all the same data, order=, seed= and epoch (set_epoch, or the same state). A loader "
        "that reads data of its own is graph.loader(rank=0, world_size=1), and loaders of different data need graphs "
        "of different names"
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _seen(plan: Plan, seed: int | None, start: str) -> str:
    """What this rank has of the data that all ranks share; empty where there is none."""
    found = []
    for stage in described(plan):
        traits = stage.spec.operator.traits
        if data := traits.sees():
            order = traits.deals_by()
            words = [f"stage {stage.name!r}: {data}", *([order, f"seed {seed}"] if order else [])]
            found.append(", ".join(words))
    return "; ".join([*found, *([start] if start and found else [])])


def _store() -> Any:
    from torch.distributed import distributed_c10d

    found = getattr(distributed_c10d, "_get_default_store", None)
    return None if found is None else found()
