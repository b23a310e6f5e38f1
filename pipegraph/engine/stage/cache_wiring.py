"""Makes the stages above a Cache skip what it already holds.

The source asks the cache before it reads. What is found travels as a :class:`Hit`, which the stages in
between pass on untouched, and the cache opens. Nothing else in the engine knows of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from pipegraph.chunk import Chunk
from pipegraph.contracts import Drawn, Memo, Operator, Source
from pipegraph.engine.stage.function_code import code_of
from pipegraph.errors import GraphError
from pipegraph.global_generators import drew
from pipegraph.planning.plan import Plan, StagePlan, lineage_above


class Hit:
    """A value from a cache, on its way through the stages that would have made it."""

    __slots__ = ("keys", "value")

    def __init__(self, keys: tuple[Any, ...] | None, value: Any) -> None:
        self.keys = keys
        self.value = value


def upstream_digest(plan: Plan, stage: StagePlan) -> str:
    """What the stages above a cache are, for the names of its entries."""
    above = lineage_above(stage, plan.stages)
    digests = plan.digests()
    text = json.dumps(
        [[type(each.operator).__qualname__, digests[each.name], _code_of(each.operator)] for each in above]
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _code_of(operator: Operator | Source) -> str:
    """What the user's functions do, beside their names: one that was edited makes its values anew."""
    return "" if isinstance(operator, Source) else "".join(map(code_of, operator.functions()))


class _Random:
    """Whether a stage above a cache has drawn random numbers, which shows when it does: the cache refuses from then on.

    Attributes:
        stage: the first that did. Set before its sample reaches the cache, so that no such sample is kept.
    """

    def __init__(self) -> None:
        self.stage: str | None = None

    def refusing(self, process: Callable[[Chunk], Any], cache: str) -> Callable[[Chunk], Any]:
        """``process`` of the cache."""

        def refuse(chunk: Chunk) -> Any:
            if self.stage is not None:
                raise GraphError(
                    f"stage {cache!r}: Cache cannot stand here: {self.stage!r} draws random numbers from torch's "
                    "generators, and every epoch must draw anew; move it up, or leave it out"
                )
            return process(chunk)

        return refuse


def _skipping(operator: Any, stage: str, random: _Random) -> _Around:
    """An operator between a source and its cache."""

    def process(chunk: Chunk) -> Any:
        if chunk.data.__class__ is Hit:
            return chunk
        made = operator.process(chunk)
        if drew():
            random.stage = stage
        return made

    def call_for(chunk: Chunk) -> Any:  # of one in a process, which must not be sent what is passed on
        return None if chunk.data.__class__ is Hit else operator.call_for(chunk)

    return _Around(operator, process=process, call_for=call_for)


class _Misses:
    """Which index was drawn for each position whose sample is on its way to the cache that asks for it there."""

    def __init__(self) -> None:
        self._indices: dict[tuple[int, int], Any] = {}

    def index_of(self, position: int, epoch: int) -> Any:
        """What was drawn."""
        return self._indices[epoch, position]

    def note(self, place: Drawn, epoch: int) -> None:
        """A sample is read: the cache does not know it."""
        self._indices[epoch, place.position] = place.index

    def forgetting(self, process: Callable[[Chunk], Any]) -> Callable[[Chunk], Any]:
        """``process`` of the cache, after which nobody asks for the index any more."""

        def forget(chunk: Chunk) -> Any:
            out = process(chunk)
            self._indices.pop((chunk.epoch, chunk.lineages[0][1]), None)
            return out

        return forget

    def clearing(self, begin_run: Callable[..., None]) -> Callable[..., None]:
        """``begin_run`` of the source: what was on its way when a run was broken off never arrives."""

        def clear(*args: Any) -> None:
            self._indices.clear()
            begin_run(*args)

        return clear


def read_cached(
    source: Source, lookup: Callable[[int], Hit | None], misses: _Misses, stage: str, random: _Random
) -> Callable[[Any, int], Any]:
    """``read`` for a source whose samples a cache may know."""
    read, index_of = source.read, source.index_of

    def reading(place: Any, epoch: int) -> Any:
        hit = lookup(index_of(place, epoch))
        if hit is not None:
            return hit
        if isinstance(place, Drawn):
            misses.note(place, epoch)
        made = read(place, epoch)
        if drew():
            random.stage = stage
        return made

    return reading


class _Around:
    """A worker's operator, some of whose methods are done differently here; all else is its own."""

    def __init__(self, operator: Any, **methods: Callable[..., Any]) -> None:
        self._operator = operator
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)


def wire_cache(plan: Plan, operators: dict[str, list[Any]], readers: dict[str, Any]) -> None:
    """Connect every cache with the workers' operators above it, before they are opened."""
    for stage in plan.running:
        if not isinstance(stage.operator, Memo):
            continue
        source, *between = reversed(lineage_above(stage, plan.stages))
        for reading in (readers[source.name], *operators[source.name]):
            reading.group = 1
        digest = upstream_digest(plan, stage)
        caches, misses, random = operators[stage.name], _Misses(), _Random()
        draws, reader = source.operator.draws, readers[source.name]  # type: ignore[union-attr]
        if draws:
            readers[source.name] = _Around(reader, begin_run=misses.clearing(reader.begin_run))
        lookup = caches[0].lookup
        for cache in caches:
            cache.attach(misses.index_of if draws else reader.index_of, digest)
        operators[stage.name] = [
            _Around(cache, process=misses.forgetting(random.refusing(cache.process, stage.name)))
            for cache in caches
        ]
        operators[source.name] = [
            _Around(each, read=read_cached(each, lookup, misses, source.name, random))
            for each in operators[source.name]
        ]
        for above in between:
            operators[above.name] = [_skipping(each, above.name, random) for each in operators[above.name]]
