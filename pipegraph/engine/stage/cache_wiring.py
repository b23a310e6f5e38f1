"""Wires a Cache so that the stages above it skip samples that it holds.

The source looks a sample up in the cache before reading it. A value that is found travels as a :class:`Hit`,
which the stages in between pass on and the cache unwraps. The rest of the engine does not know about it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pipegraph.bundle import filled
from pipegraph.chunk import Chunk
from pipegraph.contracts import Drawn, Source
from pipegraph.engine.stage.failure_policy import Outcome
from pipegraph.errors import GraphError
from pipegraph.global_generators import drew
from pipegraph.planning.plan import Plan, lineage_above

T = TypeVar("T")


class Hit:
    """A cached value, on its way through the stages that would have computed it."""

    __slots__ = ("keys", "value")

    def __init__(self, keys: tuple[object, ...] | None, value: object) -> None:
        self.keys = keys
        self.value = value


class _Override:
    """A proxy of a worker's operator with some methods overridden."""

    def __init__(self, operator: object, **methods: Callable[..., object]) -> None:
        self._operator = operator
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)


class _Wiring:
    """What the wrapped operators of one cache share: which stage above it drew random numbers (the cache then raises),
    and, for a sampler's source, the index drawn for each position whose sample is on its way to the cache.
    """

    def __init__(self, cache: str, source: str) -> None:
        self._cache = cache
        self._source = source
        # The first that drew. Set before its sample reaches the cache, so that no such sample is stored.
        self._drew: str | None = None
        self._indices: dict[tuple[int, int], object] = {}

    def index_of(self, position: int, epoch: int) -> object:
        """The index drawn for a position."""
        return self._indices[epoch, position]

    def _made(self, stage: str, call: Callable[..., T], *args: object) -> T:
        """What ``call`` gives, in a stage above the cache."""
        before = drew()  # a sampler, in the thread that has the samples read in processes
        made = call(*args)
        now = drew()
        if now is not None and now is not before:
            self._drew = stage
        return made

    def reading(self, source: Source, lookup: Callable[[int], Hit | None]) -> _Override:
        """Wrap the source to look each sample up in the cache before it is read."""
        index_of = source.index_of
        assert index_of is not None  # the plan has checked it

        def found(place: object, epoch: int) -> Hit | None:
            hit = lookup(index_of(place, epoch))
            if hit is None and isinstance(place, Drawn):
                self._indices[epoch, place.position] = place.index
            return hit

        def read(place: int, epoch: int) -> object:
            hit = found(place, epoch)
            return self._made(self._source, source.read, place, epoch) if hit is None else hit

        remote: Any = source

        def do(block: Chunk, at: int) -> Any:
            try:
                hit = found(block.data, block.epoch)
            except BaseException as error:
                return (), error
            if hit is None:
                return self._made(self._source, remote.do, block, at)
            return (filled(block, hit),), None

        return _Override(source, read=read, do=do, begin=lambda block: None)

    def skipping(self, operator: Any, stage: str) -> _Override:
        """Wrap an operator between the source and the cache to pass hits on."""

        def process(chunk: Chunk) -> object:
            if chunk.data.__class__ is Hit:
                return chunk
            return self._made(stage, operator.process, chunk)

        def begin(chunk: Chunk) -> None:  # for an operator in a process: hits are not sent there
            if chunk.data.__class__ is not Hit:
                operator.begin(chunk)

        def do(chunk: Chunk, at: int) -> Outcome:
            return (
                ((chunk,), None) if chunk.data.__class__ is Hit else self._made(stage, operator.do, chunk, at)
            )

        return _Override(operator, process=process, begin=begin, do=do)

    def storing(self, cache: Any) -> _Override:
        """Wrap the cache to raise if a stage has drawn random numbers, and to drop a drawn index afterwards."""

        def process(chunk: Chunk) -> object:
            if self._drew is not None:
                raise self._refused(self._drew)
            out = cache.process(chunk)
            self._indices.pop((chunk.epoch, chunk.lineages[0][1]), None)
            return out

        return _Override(cache, process=process)

    def _refused(self, drew: str) -> GraphError:
        what = f"stage {drew!r} above it draws random numbers from torch's generators"
        remedy = f"Move the Cache above {drew!r}, or leave it out"
        if drew == self._source:
            what = f"the data of stage {drew!r} draws random numbers from torch's generators when it is read"
            remedy = "Draw in a function below the Cache, or leave the Cache out"
        return GraphError(
            f"stage {self._cache!r}: a Cache keeps results that depend on their item alone, but {what}, which every "
            f"epoch must draw anew. {remedy}"
        )

    def clearing(self, reader: Any) -> _Override:
        """Wrap the source to drop all indices as a run begins: samples of a cancelled one never arrive."""

        def begin_run(*args: object) -> None:
            self._indices.clear()
            reader.begin_run(*args)

        return _Override(reader, begin_run=begin_run)


def wire_cache(plan: Plan, operators: dict[str, list[Any]], readers: dict[str, Any]) -> None:
    """Connect every cache with the workers' operators above it, before they are opened."""
    for stage in plan.running:
        if not stage.caches:
            continue
        source, *between = reversed(lineage_above(stage, plan.stages))
        caches, wiring = operators[stage.name], _Wiring(stage.name, source.name)
        draws, reader, lookup = source.traits.sampled, readers[source.name], caches[0].lookup
        if draws:
            readers[source.name] = wiring.clearing(reader)
        for cache in caches:
            cache.attach(wiring.index_of if draws else reader.index_of)
        operators[stage.name] = [wiring.storing(cache) for cache in caches]
        operators[source.name] = [wiring.reading(each, lookup) for each in operators[source.name]]
        for above in between:
            operators[above.name] = [wiring.skipping(each, above.name) for each in operators[above.name]]
