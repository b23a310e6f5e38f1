"""Promise 3: the same bytes for any workers, backends, capacities and timing."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pipegraph.backends import BACKENDS
from pipegraph.chunk import Chunk
from pipegraph.contracts import Operator
from pipegraph.graph import Graph
from pipegraph.testing.outcome import (
    MakeGraph,
    Outcome,
    assert_equal_chunks,
    fingerprint,
    is_ordered,
    placed,
    run_pass,
)
from pipegraph.tree import leaves


def assert_same_everywhere(
    make_graph: MakeGraph,
    epochs: int = 2,
    workers: Sequence[int] = (1, 2, 5),
    capacities: Sequence[int | None] = (None, 1),
    processes: int = 2,
    **loader_options: Any,
) -> None:
    """Run inline, which is the reference, on threads with several worker counts and queue sizes, and in processes.

    What is drawn from NumPy's or Python's global generator differs by itself: all threads share these.

    Also checks that no operator writes into arrays that it shares with others: those of a source, and those
    that several stages get.

    Args:
        make_graph: makes the graph anew each time.
        epochs: passes of each run.
        workers: threads per stage, one run each.
        capacities: of every queue, one run each.
        processes: worker processes per stage; 0 for operators that cannot leave this one.
        loader_options: for ``graph.loader``.

    Raises:
        AssertionError: an outcome differs, or a stage wrote into a shared array; says which.
    """
    ordered = is_ordered(make_graph())
    reference = _run(_watched(placed(make_graph(), "inline", 1)), epochs, loader_options)
    places = [("thread", count, capacity) for count in workers for capacity in capacities]
    if processes:
        places.append(("process", processes, None))
    for backend, count, capacity in places:
        found = _run(placed(make_graph(), backend, count, capacity), epochs, loader_options)
        for epoch, (one, other) in enumerate(zip(reference, found, strict=True)):
            workers_word = BACKENDS[backend].words[1]
            what = f"epoch {epoch} with {count} {workers_word} per stage, capacity {capacity or 'as given'}"
            assert one.error == other.error, f"{what}: raised {other.error}, inline {one.error}"
            if one.error is None or ordered:
                assert_equal_chunks(one.chunks, other.chunks, ordered, what)


def _run(graph: Graph, epochs: int, options: dict[str, Any]) -> list[Outcome]:
    with graph.loader(epochs=epochs, **options) as loader:
        return [run_pass(loader) for _ in range(epochs)]


# -- shared arrays ---------------------------------------------------------------------------------


class _Shared:
    """The arrays that several parties hold, and what was in them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}

    def add(self, data: Any) -> Any:
        for leaf in leaves(data):
            if isinstance(leaf, np.ndarray | torch.Tensor):
                self._known.setdefault(id(leaf), (leaf, fingerprint(leaf)))
        return data

    def check(self, data: Iterable[Any], stage: str) -> None:
        for leaf in data:
            known = self._known.get(id(leaf))
            assert known is None or known[1] == fingerprint(leaf), (
                f"stage {stage!r} wrote into an array that it shares with others; let it work on a copy"
            )


def _watched(graph: Graph) -> Graph:
    shared = _Shared()
    readers = Counter(edge.stage for spec in graph.stages.values() for edge in spec.upstream)
    for name, spec in graph.stages.items():
        operator: Any = spec.operator
        if not spec.upstream:
            watched = _watched_source(operator, shared)
        else:
            watched = _watched_operator(operator, name, shared, fans_out=readers[name] > 1)
        graph.stages[name] = replace(spec, operator=watched)
    return graph


def disguised(operator: Any, methods: dict[str, Any]) -> Any:
    """A copy of an operator with methods of its own, of a class that looks the same."""
    kind = type(operator)
    other = copy.copy(operator)
    other.__class__ = type(
        kind.__name__, (kind,), {**methods, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    )
    return other


def _watched_source(source: Any, shared: _Shared) -> Any:
    kind = type(source)

    def read(self: Any, position: int, epoch: int) -> Any:
        return shared.add(kind.read(self, position, epoch))

    def iterate(self: Any, *place: int) -> Iterator[tuple[int, Any]]:
        return ((position, shared.add(data)) for position, data in kind.iterate(self, *place))

    def items(self: Any, *place: int) -> Iterator[Any] | None:
        found = kind.items(self, *place)
        return None if found is None else map(shared.add, found)

    methods = {"read": read} if source.random_access else {"iterate": iterate, "items": items}
    return disguised(source, methods)


def _watched_operator(operator: Operator, stage: str, shared: _Shared, fans_out: bool) -> Any:
    kind = type(operator)

    def process(self: Any, chunk: Chunk) -> Any:
        given = list(leaves(chunk.data))
        made = kind.process(self, chunk)
        if made is not None and not isinstance(made, Chunk):
            made = list(made)
        shared.check(given, stage)
        if fans_out:
            for each in [made] if isinstance(made, Chunk) else made or ():
                shared.add(each.data)
        return made

    return disguised(operator, {"process": process})
