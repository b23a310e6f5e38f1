"""Promise 4: exact resume at every step."""

from __future__ import annotations

import json
from typing import Any

from pipegraph.graph import Graph
from pipegraph.loader.loader import Loader
from pipegraph.testing.outcome import DeliveredChunk, MakeGraph, assert_equal_chunks, is_ordered
from pipegraph.testing.own_operators import assert_operators_keep_their_word

Chunks = tuple[DeliveredChunk, ...]


def assert_resumes_exactly(make_graph: MakeGraph, epochs: int = 2, **loader_options: Any) -> None:
    """Save after every chunk, load into a fresh graph, and expect exactly the chunks that followed.

    Sources, regrouping operators, fan-ins and routes of your own are also checked for what a run takes on trust: their
    lengths, where a source begins, that groups are of consecutive chunks, that cursors hold what a fan-in goes by, and
    that a route goes by its chunk alone.

    Each state goes through JSON. Each restored loader is saved half-way and restored again: in passing, and every
    fourth time after a ``break`` there. Below stages with ``ordered=False`` samples are compared instead of chunks.

    Args:
        make_graph: makes the graph anew each time; all must be of one description.
        epochs: passes to run in all.
        loader_options: for ``graph.loader``.

    Raises:
        AssertionError: something was lost, came twice or differs; says after which chunk the state was taken. Or an
            operator breaks its contract; says how.
    """
    assert_operators_keep_their_word(make_graph, epochs, loader_options)
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
