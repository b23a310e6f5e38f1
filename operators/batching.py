"""Batch and Unbatch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CoroutineType
from typing import Any, final

import torch

from pipegraph.batches import noted, resolved, take_row
from pipegraph.bundle import Bundle, joined, samples_of
from pipegraph.chunk import Chunk
from pipegraph.columns import pack
from pipegraph.contracts import Context, Operator, Regroup, Source, Traits
from pipegraph.errors import DataError, GraphError
from pipegraph.global_generators import Draws
from pipegraph.integers import amount, flag, integer
from pipegraph.operators.collate import batch_of, collate as stack
from pipegraph.parameters import function_name, not_awaited, plain_function
from pipegraph.tree import map_leaves, own_memory


def check_cost(cost: Any, limit: Any, who: str) -> None:
    """Raises GraphError unless both ``cost`` and ``limit`` of a stage are given, or neither."""
    if (cost is None) != (limit is None):
        raise GraphError(f"{who}: cost and limit go together: {who}(..., cost=len, limit=4096)")
    if cost is not None:
        plain_function(cost, f"{who}: cost", "a sample")
        amount(limit, f"{who}: limit", refusal=GraphError)


def cost_of(cost: Callable[[Any], float], sample: Any, limit: float, who: str) -> float:
    """What a sample costs; raises DataError where that is more than the limit."""
    found = amount(cost(sample), f"{who}: cost(sample)")
    if found > limit:
        raise DataError(f"{who}: one sample costs {found}, more than limit={limit}")
    return found


@final
class Batch(Regroup):
    """Collate consecutive samples into a batch.

    Args:
        size: samples per batch on this rank.
        drop_last: leave out the last batch if it is not full; not with ``cost``, where a batch has no size to reach.
        collate: a function that makes a batch from a list of items. By default numbers, arrays and tensors are stacked
            into tensors; text, bytes, lists and objects become lists; None is refused. See
            ``pipegraph.operators.collate``. ``collate=list`` gives the plain list. With a mapping from field to
            function, these fields are collated by their function and all others by default: ``collate={"boxes": list}``
            keeps arrays of different shapes as a list.
        global_size: samples per batch over all ranks, instead of ``size``; must be a multiple of the world size.
        cost, limit: instead of ``size``: a batch takes samples while the sum of ``cost(sample)`` is at most ``limit``.
        pad: pads arrays, and lists of numbers (such as tokens), to the longest: a value, an ``ops.Pad`` (which can
            add masks and lengths, and choose the size), or a mapping from field to one of these. Without it, lists stay
            lists, whatever their lengths.

    With ``cost``, a ``Batch`` directly after a ``Bucket`` with a limit never mixes the bucket's groups.

    Raises:
        GraphError: none or several of ``size``, ``global_size`` and ``cost`` are given, one is out of range,
            ``drop_last`` is given with ``cost``, or ``collate`` or ``cost`` is not a plain function.
        DataError: while it runs: samples cannot be collated, such as arrays of different shapes without ``pad``, or
            a sample costs more than ``limit``.
    """

    gives = "batch"
    needs = "sample"

    def __init__(
        self,
        size: int | None = None,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | Mapping[Any, Callable[[list[Any]], Any]] | None = None,
        global_size: int | None = None,
        cost: Callable[[Any], float] | None = None,
        limit: float | None = None,
        pad: Any = None,
    ) -> None:
        ways = {"size": size, "global_size": global_size, "cost": cost}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) != 1:
            raise GraphError(
                f"Batch: give exactly one of size, global_size or cost with limit, got {given or 'none'}"
            )
        check_cost(cost, limit, "Batch")
        fields = collate if isinstance(collate, Mapping) else {}
        for name, function in fields.items():
            plain_function(function, f"Batch: collate of {name!r}", "a list of values")
        if collate is not None and not isinstance(collate, Mapping):
            plain_function(collate, "Batch: collate", "a list of samples")
        named = pad if isinstance(pad, Mapping) else {}
        if pad is not None and collate is not None and (not fields or named.keys() & fields.keys()):
            raise GraphError(
                "Batch: give pad or collate, not both: pad is for the batches and fields that Batch makes itself"
            )
        self._rules: Any = pad
        self._only_fills = True  # equal sizes stay as they are, and no field is added
        if pad is not None or fields:
            from pipegraph.operators.padding import ByField, check_pad

            self._only_fills = check_pad(pad)
            if fields:
                self._rules = ByField({**named, **fields}, None if named else pad)
        self.size = None if size is None else integer(size, "Batch: size")
        self.global_size = None if global_size is None else integer(global_size, "Batch: global_size")
        self.drop_last = flag(drop_last, "Batch: drop_last")
        if self.drop_last and cost is not None:
            raise GraphError("Batch: drop_last=True needs size or global_size: with cost no batch is full")
        self.collate = None if isinstance(collate, Mapping) else collate
        self._fields = dict(fields)
        self.cost, self.limit, self.pad = cost, limit, pad
        self._transposes = collate is torch.utils.data.default_collate
        self._group_of: Callable[[Any], Any] | None = None
        self._group: Any = None
        self._draws = Draws()
        self.begin()

    def config(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "global_size": self.global_size,
            "drop_last": self.drop_last,
            "collate": {str(name): function_name(each) for name, each in self._fields.items()}
            or _name(self.collate),
            "cost": _name(self.cost),
            "limit": self.limit,
            "pad": repr(self.pad),
        }

    @property
    def traits(self) -> Traits:
        functions = (self.collate, *self._fields.values(), self.cost)
        plain = self.collate is None and not self._fields
        return Traits(
            trusted=True,
            independent=True,
            seeds_itself=self.cost is None,
            out_of_step=self.cost is not None,
            blocks=self.cost is None,
            stacks=self.cost is None and plain,
            bind=self._bound,
            length_for=self._length_for,
            functions=tuple(each for each in functions if each is not None),
        )

    def _bound(self, upstream: Sequence[Operator | Source]) -> Operator:
        key = upstream[0].traits.key
        if self.cost is None or key is None:
            return self
        bound = copy.copy(self)
        bound._group_of = key
        return bound

    def begin(self) -> None:
        self._open: list[Chunk] = []
        self._held = 0  # samples in them
        self._sum: float = 0

    def _per_rank(self, world_size: int) -> int | None:
        if self.global_size is None:
            return self.size
        if self.global_size % world_size:
            below = self.global_size - self.global_size % world_size
            raise GraphError(
                f"Batch: global_size={self.global_size} is not a multiple of the {world_size} ranks; "
                f"use {below or world_size} or {below + world_size}"
            )
        return self.global_size // world_size

    def open(self, context: Context) -> None:
        self.size = self._per_rank(context.world_size)
        self._draws = Draws(context.seed, context.stage)
        self.begin()

    def group_size(self, world_size: int = 1) -> int:
        size = self._per_rank(world_size)
        assert size is not None
        return size

    def _length_for(self, n: int, world_size: int) -> int | None:
        size = self._per_rank(world_size)
        return None if size is None else n // size if self.drop_last else -(-n // size)

    def length(self, n: int) -> int | None:
        return self._length_for(n, 1)

    def missing(self) -> int:
        assert self.size is not None
        return self.size - self._held

    def take_bundle(self, bundle: Bundle) -> Sequence[Chunk]:
        return self._add(bundle, bundle.count)

    def packing(self) -> Callable[[list[Any]], Any] | None:
        return pack if self.collate is None and not self._fields and self._only_fills else None

    def _add(self, chunk: Chunk, items: int) -> Sequence[Chunk]:
        self._open.append(chunk)
        self._held += items
        return self._close() if self._held == self.size else ()

    def flush(self) -> Iterable[Chunk]:
        if self.drop_last and self.size is not None:
            self.begin()
        return self._close() if self._open else ()

    def _close(self) -> Sequence[Chunk]:
        chunks = self._open
        self.begin()
        return [self._made_of(chunks)]

    def process(self, chunk: Chunk) -> Iterable[Chunk]:
        if self.cost is None:
            return self._add(chunk, 1)
        assert self.limit is not None
        cost = cost_of(self.cost, chunk.data, self.limit, "Batch")
        group = None if self._group_of is None else self._group_of(chunk.data)
        same, self._group = group == self._group, group
        chunks = self._open
        if (same and self._sum + cost <= self.limit) or not chunks:
            chunks.append(chunk)
            self._sum += cost
            return ()
        self._open, self._sum = [chunk], cost  # before the batch is made, which may fail
        return [self._made_of(chunks)]

    def _made_of(self, chunks: list[Chunk]) -> Chunk:
        bundles = [chunk for chunk in chunks if chunk.__class__ is Bundle]
        batch = joined(chunks) if bundles else Chunk.group(chunks, None)
        self.failing = (batch,)
        if len(bundles) == len(chunks) and all(bundle.packed is not None for bundle in bundles):
            batch.data = batch_of([part for bundle in bundles for part in bundle.packed.parts], self.pad)
        else:
            items = [chunk.data for chunk in chunks]
            if bundles:
                items = [item for chunk in chunks for item in samples_of(chunk)]
            batch.data = self._collated(items, batch)
            batch.layout = noted(batch.data, items, self._transposes)
        self.failing = ()
        return batch

    def _collated(self, items: list[Any], first: Chunk) -> Any:
        if self.collate is None and not self._fields:
            return stack(items, self.pad)
        self._draws.one(first.epoch, first.lineages[0])
        made = stack(items, self._rules) if self.collate is None else self.collate(items)
        if made.__class__ is CoroutineType:
            raise not_awaited(made)
        return made


def _name(function: Any) -> str | None:
    return None if function is None else function_name(function)


@final
class Unbatch(Operator):
    """Split batches into their samples, each with the lineage that it had before.

    ``pipegraph.batches`` defines which parts of a batch have a row per sample. Parts that belong to the whole batch go
    to every sample.
    """

    traits = Traits(seeds_itself=True, independent=True)
    kind = "expand"
    needs = "batch"
    gives = "sample"
    one_to_one = False

    def process(self, chunk: Chunk) -> Iterator[Chunk]:
        count = len(chunk.row_lineages)
        parts = resolved(chunk.data, chunk.layout, count)
        for index in range(count):
            # Copied: a view would keep the whole batch's memory for as long as one of its samples lives.
            yield chunk.row(index, map_leaves(own_memory, take_row(chunk.data, parts, index)))
