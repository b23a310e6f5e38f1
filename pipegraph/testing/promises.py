"""Promises 3 and 4 of a pipeline: the same bytes everywhere, and exact resume at every step."""

from __future__ import annotations

import json
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
from pipegraph.loader.loader import Loader
from pipegraph.testing.outcome import (
    DeliveredChunk,
    MakeGraph,
    Outcome,
    assert_equal_chunks,
    disguised,
    fingerprint,
    is_ordered,
    placed,
    run_pass,
)
from pipegraph.tree import leaves

Chunks = tuple[DeliveredChunk, ...]


def assert_resumes_exactly(make_graph: MakeGraph, epochs: int = 2, **loader_options: Any) -> None:
    """Save after every chunk, load into a fresh graph, and expect exactly the chunks that followed.

    This proves an operator of your own: what follows differs where a source does not begin at its ``start``, a
    regrouping operator carries a remainder over without a state, a fan-in's cursor lacks what it goes by, or a route
    goes by more than its chunk. Lengths are compared too. Give it some thirty samples, of uneven sizes.

    Each state goes through JSON. Each restored loader is saved half-way and restored again: in passing, and every
    fourth time after a ``break`` there. Below stages with ``ordered=False`` samples are compared instead of chunks.

    Args:
        make_graph: makes the graph anew each time; all must be of one description.
        epochs: passes to run in all.
        loader_options: for ``graph.loader``.

    Raises:
        AssertionError: something was lost, came twice or differs; says after which chunk the state was taken.
    """
    ordered = is_ordered(make_graph())
    whole, states = _uninterrupted(make_graph, epochs, loader_options)

    def compare(before: Chunks, rest: Chunks, what: str) -> None:
        if ordered:
            assert_equal_chunks(whole[len(before) :], rest, True, what)
        else:
            assert_equal_chunks(whole, before + rest, False, what)

    for number, ((epoch, count), state, before) in enumerate(states):
        what = f"restored after {count} chunks of epoch {epoch}"
        middle = (len(whole) - len(before)) // 2
        rest, half, again = _restored(make_graph(), state, epochs, loader_options, middle)
        compare(before, rest, what)
        if number % 4 == 0:
            _, half, again = _restored(make_graph(), state, epochs, loader_options, middle, leaves=True)
        rest, _, _ = _restored(make_graph(), again, epochs, loader_options, 0)
        compare(before + half, rest, f"{what}, and again after {len(half)} more")


def _uninterrupted(
    make_graph: MakeGraph, epochs: int, options: dict[str, Any]
) -> tuple[Chunks, list[tuple[tuple[int, int], str, Chunks]]]:
    """All chunks, and ``((epoch, chunks of it), state, chunks before)`` at every step."""
    chunks: list[DeliveredChunk] = []
    states = []
    with make_graph().loader(epochs=epochs, **options) as loader:

        def save(epoch: int, count: int) -> None:
            states.append(((epoch, count), json.dumps(loader.state_dict()), tuple(chunks)))

        for epoch in range(epochs):
            count, length = 0, _length(loader)
            save(epoch, 0)
            for count, chunk in enumerate(loader.chunks(), 1):
                chunks.append(DeliveredChunk.of(chunk))
                save(epoch, count)
            assert length in (count, None), (
                f"by the lengths that its stages say epoch {epoch} has {length} chunks, and {count} came: let each "
                "return its true length, or None where the data decides"
            )
    return tuple(chunks), states


def _length(loader: Loader) -> int | None:
    try:
        return len(loader)
    except Exception:
        return None


def _restored(
    graph: Graph, state: str, epochs: int, options: dict[str, Any], middle: int, leaves: bool = False
) -> tuple[Chunks, Chunks, str]:
    """All that comes after loading a state, its first ``middle`` chunks, and the state then; ``leaves``: by a break."""
    chunks: list[DeliveredChunk] = []
    half: Chunks = ()
    again = state
    with graph.loader(epochs=epochs, **options) as loader:
        loader.load_state_dict(json.loads(state))
        while loader.epoch < epochs and not (leaves and len(chunks) == middle):
            for chunk in loader.chunks():
                chunks.append(DeliveredChunk.of(chunk))
                if len(chunks) == middle:
                    if leaves:
                        break
                    half, again = tuple(chunks), json.dumps(loader.state_dict())
        if leaves:
            half, again = tuple(chunks), json.dumps(loader.state_dict())
    return tuple(chunks), half, again


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
