"""Cuts a call's arguments or a batch into one part per replica, fetched by the replica's own thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from pipegraph.device.backend import Slot
from pipegraph.device.split import (
    Scattered,
    Whole,
    chunk_sizes_for,
    cut,
    leaves,
    moved,
    part_rows,
    rows_of,
)
from pipegraph.errors import ReplicaError


@dataclass(frozen=True)
class ReplicaFeed:
    """Parts of one call.

    Attributes:
        fetch: by replica a function that gives its part, on its device, ready for the thread's stream.
        rows: by replica; None where they are unknown.
        parts: as they were given or cut.
    """

    fetch: Sequence[Callable[[], Any]]
    rows: list[int | None]
    parts: Sequence[Any]

    def shapes(self) -> object:
        """What a compiler would specialise on."""
        return tuple(
            (path, tuple(leaf.shape), leaf.dtype)
            for path, leaf in leaves(list(self.parts))
            if isinstance(leaf, torch.Tensor)
        )


def batch_feed(batch: Any, slots: Sequence[Slot], dim: int) -> ReplicaFeed:
    """A batch, already scattered or to be cut here, lists of its row count included.

    Raises:
        ReplicaError: scattered over other devices, or nothing to cut.
        ValueError: unequal row counts.
    """
    if isinstance(batch, Scattered):
        return _scattered_feed(batch, slots, dim)
    rows = rows_of(batch, dim, "batch")
    if rows is None:
        raise ReplicaError("the batch holds no tensor with rows to cut")
    sizes = chunk_sizes_for(rows, len(slots))
    return _moving(cut(batch, sizes, dim, lists=True), sizes, slots)


def call_feed(args: tuple[Any, ...], kwargs: dict[str, Any], slots: Sequence[Slot], dim: int) -> ReplicaFeed:
    """Arguments of a call; each part is a pair (args, kwargs), which are cut as one."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Scattered):
        feed = _scattered_feed(args[0], slots, dim)
        return replace(feed, fetch=[_as_argument(fetch) for fetch in feed.fetch])
    both = (args, kwargs)
    rows = rows_of(both, dim)
    if rows is None:
        # Nothing to cut: every replica gets all of it; without any inputs one replica is called.
        sizes = [0] * (len(slots) if args or kwargs else 1)
    else:
        sizes = chunk_sizes_for(rows, len(slots))
    return _moving(cut(both, sizes, dim), sizes, slots)


def _scattered_feed(batch: Scattered, slots: Sequence[Slot], dim: int) -> ReplicaFeed:
    places = [slot.device for slot in slots]
    if list(batch.devices) != places[: len(batch)]:
        raise ReplicaError(
            f"the batch is scattered over {list(map(str, batch.devices))}, the executor's devices are "
            f"{list(map(str, places))}"
        )
    rows = list(batch.rows or [part_rows(part, dim) for part in batch])
    fetch = [partial(batch.wait, replica) for replica in range(len(batch))]
    return ReplicaFeed(fetch, rows, batch)


def _moving(parts: list[Any], rows: Sequence[int | None], slots: Sequence[Slot]) -> ReplicaFeed:
    return ReplicaFeed([_mover(part, slots[r].device) for r, part in enumerate(parts)], list(rows), parts)


def _mover(part: Any, device: torch.device) -> Callable[[], Any]:
    if from_another_gpu(part, device):
        # The caller's current stream of that GPU made the part; a replica's thread has another one there.
        there = moved(part, device)
        return lambda: there
    return lambda: moved(part, device)


def from_another_gpu(part: Any, device: torch.device) -> bool:
    """Whether a copy of this part depends on the stream that is current on another device than its own."""
    return any(
        isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" and leaf.device != device
        for _, given in leaves(part)
        for _, leaf in leaves(given.value if isinstance(given, Whole) else given)
    )


def _as_argument(fetch: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: ((fetch(),), {})
