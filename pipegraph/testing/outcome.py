"""A loader's output as comparable values."""

from __future__ import annotations

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


SHOWN = 200
"""Characters of a value that are shown."""


def difference(one: Any, other: Any, where: str = "") -> str:
    """The first difference between two fingerprints (see ``outcome.fingerprint``): where it is, and both values."""
    at = where or "the data"
    if not isinstance(one, tuple) or not isinstance(other, tuple) or not one or not other:
        return f"{at}: should be {brief(one)}, is {brief(other)}"
    if one[0] != other[0]:
        return f"{at}: should be of type {brief(one[0])}, is {brief(other[0])}: {brief(one)}, {brief(other)}"
    kind = one[0]
    if kind in ("tensor", "array"):
        return _arrays(one, other, at)
    if kind == "mapping":
        return _mappings(one, other, where)
    for number, (a, b) in enumerate(zip(one[1:], other[1:], strict=False)):
        if a != b:
            return difference(a, b, f"{where}[{number}]")
    return f"{at}: should have {len(one) - 1} entries, has {len(other) - 1}"


def _mappings(one: Any, other: Any, where: str) -> str:
    expected, found = dict(one[1:]), dict(other[1:])
    for key, value in expected.items():
        if key not in found:
            return f"{where or 'the data'}: key {key!r} is missing; it has {brief(list(found))}"
        if value != found[key]:
            return difference(value, found[key], f"{where}[{key!r}]")
    return f"{where or 'the data'}: has keys that it should not have: {brief([k for k in found if k not in expected])}"


def _arrays(one: Any, other: Any, at: str) -> str:
    kind, dtype, shape, data = one
    if (dtype, shape) != other[1:3]:
        return f"{at}: should be a {kind} of {dtype} {shape}, is of {other[1]} {other[2]}"
    name = dtype.removeprefix("torch.")
    try:
        a, b = (np.frombuffer(each, np.dtype(name)) for each in (data, other[3]))
    except TypeError:  # one that numpy does not know: by bytes
        a, b = (np.frombuffer(each, np.uint8) for each in (data, other[3]))
        shape = a.shape
    differs = (
        np.flatnonzero(a.view(np.uint8).reshape(a.size, -1) != b.view(np.uint8).reshape(b.size, -1))
        if a.size
        else a
    )
    first = int(differs[0]) // a.itemsize
    count = len(np.unique(differs // a.itemsize))
    index = [int(i) for i in np.unravel_index(first, shape)]
    return f"{at}: {count} of {a.size} values differ; at {index} it should be {a[first]}, is {b[first]}"


def brief(value: Any) -> str:
    """The ``repr`` of a value, cut."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
