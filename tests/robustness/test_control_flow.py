"""Exceptions that mean something to Python itself, raised where users raise them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops


def collected(*stages: Any, source: Any = range(6), **options: Any) -> tuple[list[Any], BaseException | None]:
    """What was delivered before the first error, and the error."""
    graph = pg.Graph("flow")
    node = graph.add(ops.FromIterable(source))
    for stage in stages:
        node = node.then(stage, **options)
    got: list[Any] = []
    with graph.loader() as loader:
        try:
            for item in loader:
                got.append(item)
        except BaseException as error:
            return got, error
    return got, None


def raises_later(error: Any) -> Callable[[int], Any]:
    async def function(x: int) -> int:
        await asyncio.sleep(0)
        if x == 3:
            raise error
        return x

    return function


class Particular(Exception):
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(4), Particular(4, reason="x")])
def test_any_error_of_an_async_function_comes_through_and_stops_the_loop_of_none(
    error: BaseException, workers: int
) -> None:
    got, found = collected(raises_later(error), workers=workers)
    assert got == [0, 1, 2] and found is error


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
