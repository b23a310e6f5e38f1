"""Promise 4: exact resume at every step."""

from __future__ import annotations

import json
from typing import Any

from pipegraph.graph import Graph
from pipegraph.testing.outcome import (
    DeliveredChunk,
    MakeGraph,
    assert_equal_chunks,
    is_ordered,
    run_pass,
)


def assert_resumes_exactly(make_graph: MakeGraph, epochs: int = 2, **loader_options: Any) -> None:
    """Save after every chunk, load into a fresh graph, and expect exactly the chunks that followed.

    Each state goes through JSON. From each restored loader a second state is taken half-way and restored
    again. Below stages with ``ordered=False`` samples are compared instead of chunks.

    Args:
        make_graph: makes the graph anew each time; all must be of one description.
        epochs: passes to run in all.
        loader_options: for ``graph.loader``.

    Raises:
        AssertionError: something was lost, came twice or differs; says after which chunk the state was taken.
    """
    ordered = is_ordered(make_graph())
    whole, states = _uninterrupted(make_graph, epochs, loader_options)
    for (epoch, count), state, before in states:
        what = f"restored after {count} chunks of epoch {epoch}"
        rest, again = _restored(make_graph(), state, epochs, loader_options, None)
        _compare(whole, before, rest, ordered, what)
        half, again = _restored(make_graph(), state, epochs, loader_options, len(rest) // 2)
        assert again is not None
        rest, _ = _restored(make_graph(), again, epochs, loader_options, None)
        _compare(whole, before + half, rest, ordered, f"{what}, and again after {len(half)} more")


def _compare(
    whole: tuple[DeliveredChunk, ...],
    before: tuple[DeliveredChunk, ...],
    rest: tuple[DeliveredChunk, ...],
    ordered: bool,
    what: str,
) -> None:
    if ordered:
        assert_equal_chunks(whole[len(before) :], rest, True, what)
    else:
        assert_equal_chunks(whole, before + rest, False, what)


def _uninterrupted(
    make_graph: MakeGraph, epochs: int, options: dict[str, Any]
) -> tuple[tuple[DeliveredChunk, ...], list[tuple[tuple[int, int], str, tuple[DeliveredChunk, ...]]]]:
    """All chunks, and ``((epoch, chunks of it), state, chunks before)`` at every step."""
    chunks: list[DeliveredChunk] = []
    states = []
    with make_graph().loader(epochs=epochs, **options) as loader:

        def save(epoch: int, count: int) -> None:
            states.append(((epoch, count), json.dumps(loader.state_dict()), tuple(chunks)))

        for epoch in range(epochs):
            save(epoch, 0)
            for count, chunk in enumerate(loader.chunks(), 1):
                chunks.append(DeliveredChunk.of(chunk))
                save(epoch, count)
    return tuple(chunks), states


def _restored(
    graph: Graph, state: str, epochs: int, options: dict[str, Any], limit: int | None
) -> tuple[tuple[DeliveredChunk, ...], str | None]:
    """What comes after loading a state: everything, or the first ``limit`` chunks and the state then."""
    chunks: tuple[DeliveredChunk, ...] = ()
    with graph.loader(epochs=epochs, **options) as loader:
        loader.load_state_dict(json.loads(state))
        while loader.epoch < epochs:
            left = None if limit is None else limit - len(chunks)
            if left == 0:
                return chunks, json.dumps(loader.state_dict())
            outcome = run_pass(loader, left)
            assert outcome.error is None, f"a restored pass failed: {outcome.error}"
            chunks += outcome.chunks
            if left is not None and len(outcome.chunks) == left:
                return chunks, json.dumps(loader.state_dict())
        return chunks, json.dumps(loader.state_dict())
