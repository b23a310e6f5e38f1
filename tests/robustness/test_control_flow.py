"""Exceptions that mean something to Python itself, raised where users raise them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pipegraph as pg
from pipegraph import operators as ops


def test_breaking_off_cancels_the_tasks_that_wait() -> None:
    started, ended = [], []

    async def wait(x: int) -> int:
        started.append(x)
        try:
            if x:
                await asyncio.Event().wait()
            return x
        finally:
            ended.append(x)

    graph = pg.Graph("waits")
    graph.add(ops.FromIterable(range(4))).then(wait, workers=4)
    with graph.loader() as loader:
        assert next(iter(loader)) == 0
    assert sorted(started) == sorted(ended)


def test_generators_are_closed_where_they_are_left() -> None:
    closed = []

    def endless(name: str) -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.append(name)

    graph = pg.Graph("left")
    graph.add(ops.FromIterable(lambda: endless("source"))).then(ops.FlatMap(lambda x: endless("children")))
    with graph.loader() as loader:
        assert next(iter(loader)) == 1
    assert sorted(closed) == ["children", "source"]
