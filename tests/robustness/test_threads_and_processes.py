"""Loaders where nobody expects them: in several threads, in forked and spawned processes, in copies."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops


def make(n: int = 20, graph_name: str = "numbers") -> pg.Graph:
    graph = pg.Graph(graph_name, seed=1)
    graph.add(ops.FromSequence(range(n), order=pg.order.StridedOrder())).then(abs, workers=2).then(
        ops.Shuffle(4)
    ).then(ops.Batch(3, collate=list))
    return graph


def delivered(graph: pg.Graph) -> list[Any]:
    with graph.loader() as loader:
        return list(loader)


def in_child(work: Callable[[], str]) -> str:
    """What ``work`` returns, or its error's text, in a forked child."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        child = os.fork()
    if not child:
        signal.alarm(30)  # a child that hangs fails the test, and does not stop it
        try:
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        answer = stream.read()
    assert os.waitpid(child, 0)[1] == 0
    return answer


def test_a_loader_that_a_forked_child_inherits_says_so_and_the_parents_continues() -> None:
    whole = delivered(make())
    with make().loader() as loader:
        passing = iter(loader)
        head = [next(passing)]
        assert in_child(lambda: str(next(passing))) == (
            "LoaderClosedError: this pass (epoch 0) is over: its threads stayed in the process that forked this one"
        )
        assert in_child(lambda: str(list(loader))) == (
            "LoaderClosedError: this loader runs in the process that forked this one; make another with "
            "graph.loader(...)"
        )
        assert in_child(lambda: str(loader.close())) == "None"  # type: ignore[func-returns-value]
        assert head + list(passing) == whole


def joined(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_forked_child_makes_a_loader_of_its_own() -> None:
    whole = delivered(make())
    with make().loader() as loader:
        next(iter(loader))
        assert in_child(lambda: str(delivered(make()))) == str(whole)


def test_threads_that_share_a_pass_get_each_chunk_once() -> None:
    got: list[list[int]] = []
    with make(3000).loader() as loader:
        passing = iter(loader)
        threads = [threading.Thread(target=lambda: got.extend(passing)) for _ in range(3)]
        for thread in threads:
            thread.start()
        joined(*threads)
        assert loader.epoch == 1
    assert sorted(x for batch in got for x in batch) == list(range(3000))


def test_closing_from_another_thread_ends_the_loop_with_the_reason() -> None:
    begun = threading.Event()
    loader = make(10**6).loader()

    def close() -> None:
        assert begun.wait(60)
        loader.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(pg.errors.LoaderClosedError, match="the loader was closed"):
        for _ in loader:
            begun.set()
    joined(closer)


def test_states_and_profiles_are_taken_from_other_threads_while_batches_come() -> None:
    graph = pg.Graph("unordered")
    graph.add(ops.FromSequence(range(900))).then(abs, workers=3, ordered=False).then(ops.Batch(3))
    with graph.loader() as loader:
        passing = iter(loader)
        next(passing)
        looked = threading.Thread(
            target=lambda: [(loader.state_dict(), str(loader.profile())) for _ in range(50)]
        )
        looked.start()
        assert sum(1 for _ in passing) == 299
        joined(looked)
        assert loader.profile().samples == 900
