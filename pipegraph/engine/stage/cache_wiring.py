"""Wires a Cache so that the stages above it skip samples that it holds.

The source looks a sample up in the cache before reading it. A value that is found travels as a :class:`Hit`,
which the stages in between pass on and the cache unwraps. The rest of the engine does not know about it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from pipegraph.capabilities import Sampled, functions_of
from pipegraph.chunk import Chunk
from pipegraph.contracts import Drawn, Source
from pipegraph.engine.stage.cache_watch import CacheWatch, WatchedStage, watched
from pipegraph.engine.stage.function_code import code_of
from pipegraph.errors import GraphError
from pipegraph.global_generators import drew
from pipegraph.planning.plan import Plan, StagePlan, lineage_above


class Hit:
    """A cached value, on its way through the stages that would have computed it."""

    __slots__ = ("keys", "value")

    def __init__(self, keys: tuple[Any, ...] | None, value: Any) -> None:
        self.keys = keys
        self.value = value


def upstream_digest(plan: Plan, stage: StagePlan) -> str:
    """A digest of the stages above a cache, for the names of its entries."""
    above = lineage_above(stage, plan.stages)
    digests = plan.digests()
    text = json.dumps(
        [[type(each.operator).__qualname__, digests[each.name], _code_of(each)] for each in above]
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _code_of(stage: StagePlan) -> str:
    """The code of a stage's user functions, so that an edited function's values are computed again."""
    return "" if stage.source is not None else "".join(map(code_of, functions_of(stage.operator)))


class _RandomnessCheck:
    """Detects that a stage above a cache draws random numbers, when it does; the cache then raises.

    Attributes:
        stage: the first that drew. Set before its sample reaches the cache, so that no such sample is stored.
        source: the stage that reads the samples.
    """

    def __init__(self, source: str, watches: dict[str, WatchedStage]) -> None:
        self.stage: str | None = None
        self.source = source
        self._watches = watches

    def refusing(self, process: Callable[[Chunk], Any], cache: str) -> Callable[[Chunk], Any]:
        """Wrap the cache's ``process`` to raise if a stage has drawn random numbers."""

        def refuse(chunk: Chunk) -> Any:
            if self.stage is not None:
                raise GraphError(
                    f"stage {cache!r}: a Cache keeps results that depend on their item alone, but stage "
                    f"{self.stage!r} above it draws random numbers from torch's generators, which every epoch must "
                    f"draw anew. Move the Cache above {self.stage!r}, or leave it out"
                    if self.stage != self.source
                    else f"stage {cache!r}: a Cache keeps results that depend on their item alone, but the data of "
                    f"stage {self.stage!r} draws random numbers from torch's generators when it is read, which every "
                    "epoch must draw anew. Draw in a function below the Cache, or leave the Cache out"
                )
            return process(chunk)

        return refuse

    def watched(self, stage: str, call: Callable[..., Any], *args: Any) -> Any:
        """What ``call`` gives, in a stage above the cache."""
        before = drew()  # a sampler, in the thread that has the samples read in processes
        watch = self._watches.get(stage)
        made = call(*args) if watch is None else watch.use(call, *args)
        now = drew()
        if now is not None and now is not before:
            self.stage = stage
        return made


def _skipping(operator: Any, stage: str, random: _RandomnessCheck) -> _Override:
    """Wrap an operator between a source and its cache to pass hits on."""

    def process(chunk: Chunk) -> Any:
        if chunk.data.__class__ is Hit:
            return chunk
        return random.watched(stage, operator.process, chunk)

    def call_for(chunk: Chunk) -> Any:  # for an operator in a process: hits are not sent there
        return None if chunk.data.__class__ is Hit else operator.call_for(chunk)

    return _Override(operator, process=process, call_for=call_for)


class _DrawnIndices:
    """The index drawn for each position whose sample is on its way to the cache, which needs it to store the value."""

    def __init__(self) -> None:
        self._indices: dict[tuple[int, int], Any] = {}

    def index_of(self, position: int, epoch: int) -> Any:
        """The index drawn for a position."""
        return self._indices[epoch, position]

    def note(self, place: Drawn, epoch: int) -> None:
        """Record a cache miss: its sample is read."""
        self._indices[epoch, place.position] = place.index

    def forgetting(self, process: Callable[[Chunk], Any]) -> Callable[[Chunk], Any]:
        """Wrap the cache's ``process`` to drop the index afterwards."""

        def forget(chunk: Chunk) -> Any:
            out = process(chunk)
            self._indices.pop((chunk.epoch, chunk.lineages[0][1]), None)
            return out

        return forget

    def clearing(self, begin_run: Callable[..., None]) -> Callable[..., None]:
        """Wrap the source's ``begin_run`` to drop all indices: samples of a cancelled run never arrive."""

        def clear(*args: Any) -> None:
            self._indices.clear()
            begin_run(*args)

        return clear


def read_cached(
    source: Source,
    lookup: Callable[[int], Hit | None],
    drawn: _DrawnIndices,
    stage: str,
    random: _RandomnessCheck,
) -> Callable[[Any, int], Any]:
    """Wrap a source's ``read`` to look each sample up in the cache first."""
    read, index_of = source.read, source.index_of
    assert index_of is not None  # the plan has checked it

    def reading(place: Any, epoch: int) -> Any:
        hit = lookup(index_of(place, epoch))
        if hit is not None:
            return hit
        if isinstance(place, Drawn):
            drawn.note(place, epoch)
        return random.watched(stage, read, place, epoch)

    return reading


class _Override:
    """A proxy of a worker's operator with some methods overridden."""

    def __init__(self, operator: Any, **methods: Callable[..., Any]) -> None:
        self._operator = operator
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)


def wire_cache(plan: Plan, operators: dict[str, list[Any]], readers: dict[str, Any]) -> list[CacheWatch]:
    """Connect every cache with the workers' operators above it, before they are opened; returns their watches."""
    watches = []
    for stage in plan.running:
        if not stage.caches:
            continue
        source, *between = reversed(lineage_above(stage, plan.stages))
        for reading in (readers[source.name], *operators[source.name]):
            reading.group = 1
        digest = upstream_digest(plan, stage)
        reads = {each.name: seen for each in (source, *between) if (seen := watched(each)) is not None}
        caches, drawn, random = operators[stage.name], _DrawnIndices(), _RandomnessCheck(source.name, reads)
        watches.append(CacheWatch(stage.name, caches[0], list(reads.values())))
        draws, reader = source.operator.can(Sampled) is not None, readers[source.name]
        if draws:
            readers[source.name] = _Override(reader, begin_run=drawn.clearing(reader.begin_run))
        lookup = caches[0].lookup
        for cache in caches:
            cache.attach(drawn.index_of if draws else reader.index_of, digest)
        operators[stage.name] = [
            _Override(cache, process=drawn.forgetting(random.refusing(cache.process, stage.name)))
            for cache in caches
        ]
        operators[source.name] = [
            _Override(each, read=read_cached(each, lookup, drawn, source.name, random))
            for each in operators[source.name]
        ]
        for above in between:
            operators[above.name] = [_skipping(each, above.name, random) for each in operators[above.name]]
    return watches
