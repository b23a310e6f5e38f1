"""A loader's output as comparable values."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pipegraph.backends import BACKENDS
from pipegraph.chunk import Chunk
from pipegraph.graph import Graph
from pipegraph.loader.loader import Loader
from pipegraph.tree import bytes_of

MakeGraph = Callable[[], Graph]


def fingerprint(data: Any) -> Any:
    """A hashable value that is equal for equal trees: arrays and tensors by dtype, shape and bytes."""
    if isinstance(data, torch.Tensor):
        return ("tensor", str(data.dtype), tuple(data.shape), bytes_of(data.cpu()).numpy().tobytes())
    if isinstance(data, np.ndarray):
        if data.dtype.hasobject:
            return ("objects", data.shape, tuple(fingerprint(each) for each in data.flat))
        return ("array", data.dtype.str, data.shape, np.ascontiguousarray(data).tobytes())
    if isinstance(data, Mapping):
        items = sorted(data.items(), key=lambda item: repr(item[0]))
        return ("mapping", *((key, fingerprint(value)) for key, value in items))
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        values = (fingerprint(getattr(data, field.name)) for field in dataclasses.fields(data))
        return (type(data).__qualname__, *values)
    if isinstance(data, list | tuple):
        return (type(data).__name__, *(fingerprint(value) for value in data))
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    try:
        hash(data)
    except TypeError:
        return repr(data)
    return data


def is_ordered(graph: Graph) -> bool:
    """Whether the graph's outcome is fixed chunk by chunk, and not only sample by sample."""
    return all(spec.ordered for spec in graph.stages.values())


@dataclass(frozen=True)
class DeliveredChunk:
    """One delivered chunk."""

    epoch: int
    lineages: tuple[Any, ...]
    keys: tuple[Any, ...]
    data: Any
    batched: bool

    @classmethod
    def of(cls, chunk: Chunk) -> DeliveredChunk:
        keys = tuple(map(fingerprint, chunk.keys))
        return cls(chunk.epoch, tuple(chunk.lineages), keys, fingerprint(chunk.data), chunk.batched)

    def differs(self, other: DeliveredChunk) -> str:
        """The first difference from another chunk, in words."""
        if self.epoch != other.epoch or self.batched != other.batched:
            return f"should be {self}, is {other}"
        if self.lineages != other.lineages:
            return f"should hold the samples {brief(self.lineages)}, holds {brief(other.lineages)}"
        if self.keys != other.keys:
            return f"should have the keys {brief(self.keys)}, has {brief(other.keys)}"
        return difference(self.data, other.data)

    def __repr__(self) -> str:
        return f"<epoch {self.epoch}, samples {brief(self.lineages)}, data {brief(self.data)}>"

    def samples(self) -> Iterator[Any]:
        """What must be equal also where samples may meet in other batches."""
        data = None if self.batched else self.data
        return ((self.epoch, row, data) for row in self.lineages)


@dataclass(frozen=True)
class Outcome:
    """One pass: what it delivered, and the error that ended it, if one did."""

    chunks: tuple[DeliveredChunk, ...]
    error: tuple[str, str] | None = None


def run_pass(loader: Loader, limit: int | None = None) -> Outcome:
    """The next pass, or its first ``limit`` chunks."""
    chunks: list[DeliveredChunk] = []
    try:
        chunks.extend(DeliveredChunk.of(chunk) for chunk in itertools.islice(loader.chunks(), limit))
    except Exception as error:
        return Outcome(tuple(chunks), (type(error).__name__, str(error)))
    return Outcome(tuple(chunks))


def samples(chunks: tuple[DeliveredChunk, ...]) -> Counter[Any]:
    """The samples of chunks, in no order."""
    return Counter(itertools.chain.from_iterable(chunk.samples() for chunk in chunks))


def assert_equal_chunks(
    expected: tuple[DeliveredChunk, ...], found: tuple[DeliveredChunk, ...], ordered: bool, what: str
) -> None:
    """Chunk by chunk, or sample by sample; says what differs first."""
    if not ordered:
        missing, extra = samples(expected) - samples(found), samples(found) - samples(expected)
        assert not missing and not extra, (
            f"{what}: lost samples {_some(missing)}; extra samples {_some(extra)}"
        )
        return
    for number, (one, other) in enumerate(zip(expected, found, strict=False)):
        assert one == other, f"{what}: chunk {number}: {one.differs(other)}"
    assert len(expected) == len(found), (
        f"{what}: {len(found)} chunks instead of {len(expected)}; "
        f"the first that differs: {(expected[len(found) :] or found[len(expected) :])[0]}"
    )


def _some(counter: Counter[Any]) -> str:
    return repr([row for _, row, _ in itertools.islice(counter, 5)]) if counter else "none"


def placed(graph: Graph, backend: str, workers: int, capacity: int | None = None) -> Graph:
    """The graph with every stage placed alike."""
    for name, spec in graph.stages.items():
        graph.stages[name] = replace(
            spec,
            backend=BACKENDS[backend],
            workers=workers,
            capacity=spec.capacity if capacity is None else capacity,
        )
    return graph


def disguised(operator: Any, methods: dict[str, Any]) -> Any:
    """A copy of an operator with methods of its own, of a class that looks the same."""
    kind = type(operator)
    other = copy.copy(operator)
    other.__class__ = type(
        kind.__name__, (kind,), {**methods, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    )
    return other


SHOWN = 200
"""Characters of a value that are shown."""


def difference(one: Any, other: Any, where: str = "") -> str:
    """The first difference between two fingerprints (see :func:`fingerprint`): where it is, and both values."""
    at = where or "the data"
    if not isinstance(one, tuple) or not isinstance(other, tuple) or not one or one[:1] != other[:1]:
        return f"{at}: should be {brief(one)}, is {brief(other)}"
    kind, *values = one
    if kind == "mapping":
        expected, found = dict(values), dict(other[1:])
        if expected.keys() != found.keys():
            return f"{at}: should have the keys {brief(list(expected))}, has {brief(list(found))}"
        name = next(name for name in expected if expected[name] != found[name])
        return difference(expected[name], found[name], f"{where}[{name!r}]")
    if kind in ("tensor", "array") and one[:3] != other[:3]:
        return f"{at}: should be {brief(one[:3])}, is {brief(other[:3])}"
    if len(one) != len(other):
        return f"{at}: should have {len(values)} entries, has {len(other) - 1}"
    number = next(
        number for number, pair in enumerate(zip(values, other[1:], strict=True)) if pair[0] != pair[1]
    )
    return difference(
        values[number], other[1 + number], where if kind in ("tensor", "array") else f"{where}[{number}]"
    )


def brief(value: Any) -> str:
    """The ``repr`` of a value, cut."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
