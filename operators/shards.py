"""``ShardSelect``: which sample of which shard comes next."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import numpy as np

from pipegraph.contracts import Context, Drawn, History, Traits
from pipegraph.errors import GraphError, StateError
from pipegraph.operators.ordered import OrderedSource, digest_of, order_of
from pipegraph.operators.shared_reader import ShardFeed, ShardSample, ShardSamples
from pipegraph.order import LaneOrder, Order, PartOrder
from pipegraph.order.layout import Int64Array
from pipegraph.paths import path_of, paths_of
from pipegraph.reader.manifests import find_manifest, list_parts
from pipegraph.reader.schedule import RankSteps
from pipegraph.stopping import Once, Stopping
from pipegraph.storage import Manifest, Part

DEALT_AT_ONCE = 64
"""Positions looked up in one call: drawing one sample of a ``LaneOrder`` alone costs as much as drawing them all."""


@final
class ShardSelect(OrderedSource):
    """Which sample of which shard comes next for this rank; ``Load`` reads it.

    With ``LaneOrder`` (the default) and the other orders, every sample has a position, so resuming reads nothing again.
    The shards need a manifest. For local shards it is made before the first sample (it reads headers only, once per
    node). ``order=PartOrder()`` without a manifest reads whole shards instead, one after the other.

    Args:
        parts: a glob, a folder, a list, a brace range such as ``"part-{00001..16000}.tar"``, or a URL with these.
        order: a ``pg.order``.
        manifest: a :class:`~pipegraph.storage.Manifest`, or the file or URL that ``pipegraph index`` wrote; by default
            ``_manifest.json`` beside the shards, if it lists them.
        store: for URLs, obstore's options (``endpoint``, ``region`` ...); others are taken from the environment.
        shuffle: whether the default order shuffles; by default it does.

    Raises:
        GraphError: ``parts`` or ``manifest`` is no path, or both ``order`` and ``shuffle`` are given.
        DataError: at the first pass or ``len``: no shard has such a name, shards that the manifest lists are missing, a
            pack into the folder has not finished, a shard is damaged, or the manifest does not list these shards.
    """

    name = "shardselect"
    gives = "part"

    def __init__(
        self,
        parts: str | os.PathLike[str] | Sequence[Any],
        order: Order | None = None,
        manifest: Manifest | str | os.PathLike[str] | None = None,
        store: Mapping[str, Any] | None = None,
        shuffle: bool | None = None,
    ) -> None:
        parts = paths_of(parts, "ShardSelect: parts", Part)
        if manifest is not None and not isinstance(manifest, Manifest):
            manifest = path_of(manifest, "ShardSelect: manifest, if it is no Manifest,")
        super().__init__(order_of(order, shuffle, LaneOrder(), "ShardSelect"))
        self.parts = parts
        self.store = dict(store or {})
        self.whole_parts = isinstance(self.order, PartOrder) and manifest is None
        self.random_access = not self.whole_parts
        find = list_parts if self.whole_parts else find_manifest
        self._find = partial(find, parts, manifest, self.store)
        self._found = Once(self._find)
        self._feed: ShardFeed | None = None
        self._new_run = True  # since this copy has dealt

    @property
    def traits(self) -> Traits:
        return replace(
            super().traits,
            group=DEALT_AT_ONCE,
            encoded=True,
            light=self.random_access,
            one_world_size=self.whole_parts,
        )

    def find(self, stopping: Stopping) -> None:
        """List the parts, or find their manifest, unless that was done; ``stopping`` ends the wait for a store."""
        self._found.get(stopping, partial(self._find, stopping=stopping))

    # -- facts -----------------------------------------------------------------------------------

    def manifest(self) -> Manifest:
        """The parts with their samples and blocks.

        Raises:
            GraphError: parts are remote and there is no manifest.
        """
        manifest = self._found.get().manifest
        if manifest is None:
            raise GraphError("ShardSelect: PartOrder() without manifest= reads whole parts, and needs none")
        return manifest

    def known_manifest(self) -> Manifest | None:
        """The manifest if it was read already: looking at a plan must read nothing."""
        found = self._found.peek()
        return None if found is None else found.manifest

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes in the order of their labels, where the shards were packed from class folders."""
        manifest = self._found.get().manifest
        return () if manifest is None else manifest.classes

    def part_list(self) -> list[Part]:
        """The parts that are named, in their order."""
        return list(self._found.get().parts)

    def is_remote(self) -> bool:
        """Whether any part lies in a store."""
        parts = self.part_list() if self.whole_parts else self.manifest().parts
        return not all(part.is_local for part in parts)

    def layout(self) -> Any:
        return self.manifest()

    def has_length(self) -> bool:
        return not self.whole_parts

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        if self.whole_parts:
            return len(self._my_parts(epoch, rank, world_size))
        return super().length(epoch, rank, world_size)

    def config(self) -> dict[str, Any]:
        if self.whole_parts:
            return {"parts": [part.name for part in self.part_list()], **self.order.config()}
        return {"manifest": self.manifest().digest, **self.order.config()}

    def sees(self) -> str:
        if self.whole_parts:
            names = [part.name for part in self.part_list()]
            return f"{len(names)} shards, digest {digest_of(names)}"
        return f"{len(self.manifest().parts)} shards, {super().sees()}"

    def origin(self) -> str:
        found = self._found.peek()
        return "" if found is None else f"the manifest, {found}"

    # -- dealing ---------------------------------------------------------------------------------

    def open(self, context: Context) -> None:
        super().open(context)
        self.find(context.stopping)
        self._feed = context.share("feed", lambda: ShardFeed(self, context))

    def begin_run(self, epoch: int, history: History) -> None:
        if self.random_access:
            super().begin_run(epoch, history)
        elif history:
            raise StateError(
                "ShardSelect(order=PartOrder()) without a manifest resumes at the same world size only: "
                f"resume with {history[-1][0]} ranks, or give it a manifest="
            )
        self._new_run = True

    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[int | Drawn]:
        if self._feed is not None:
            history = self._consumed(epoch)
            args = (epoch, rank, world_size, history)
            self._deal(RankSteps(epoch, start, self._left(*args), partial(self._blocks, *args)))
        yield from super().positions(epoch, rank, world_size, start)

    def _deal(self, steps: RankSteps) -> None:
        assert self._feed is not None
        self._feed.deal(steps, self._new_run)
        self._new_run = False

    def _blocks(
        self, epoch: int, rank: int, world_size: int, history: History, first: int, last: int
    ) -> Int64Array:
        """The block that each of this rank's steps first..last-1 reads."""
        manifest = self.manifest()
        indices = self.order.indices(manifest, self.seed, epoch, rank, world_size, first, last, history)
        return np.searchsorted(manifest.first_sample, indices, side="right") - 1

    def read_into(self, found: list[Any], indices: Sequence[Any], start: int) -> None:
        found += self.encoded(indices[start:]).rows()

    def encoded(self, indices: Sequence[Any]) -> ShardSamples:
        feed = self._feed
        assert feed is not None
        starts, drawn = self.manifest().first_sample, np.asarray(indices, np.int64)
        numbers = np.searchsorted(starts, drawn, side="right") - 1
        return ShardSamples(feed, numbers, drawn - starts[numbers])

    def _my_parts(self, epoch: int, rank: int, world_size: int) -> list[int]:
        assert isinstance(self.order, PartOrder)
        numbers = self.order.parts(len(self.part_list()), self.seed, epoch, rank, world_size)
        return [int(number) for number in numbers]

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[tuple[int, Any]]:
        mine = self._my_parts(epoch, rank, world_size)
        feed = self._feed
        assert feed is not None
        numbers = np.array(mine, dtype=np.int64)
        blocks: Callable[[int, int], Int64Array] = lambda first, last: numbers[first:last]  # noqa: E731
        self._deal(RankSteps(epoch, start, len(mine), blocks))
        for step in range(start, len(mine)):
            yield step * world_size + rank, ShardSample(feed, mine[step])
