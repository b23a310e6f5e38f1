"""Exceptions that mean something to Python itself, raised where users raise them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
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


def raises(error: Any) -> Callable[[int], int]:
    def function(x: int) -> int:
        if x == 3:
            raise error
        return x

    return function


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


@pytest.mark.parametrize("options", [{"backend": "inline"}, {"workers": 1}, {"workers": 3}])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(4), Particular(4, reason="x"), ExceptionGroup("g", [OSError()])]
)
def test_any_error_comes_through_as_itself_at_its_place(
    error: BaseException, options: dict[str, Any]
) -> None:
    got, found = collected(raises(error), **options)
    assert got == [0, 1, 2] and found is error


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(4), Particular(4, reason="x")])
def test_any_error_of_an_async_function_comes_through_and_stops_the_loop_of_none(
    error: BaseException, workers: int
) -> None:
    got, found = collected(raises_later(error), workers=workers)
    assert got == [0, 1, 2] and found is error


def test_stop_iteration_never_ends_an_epoch_early() -> None:
    def generator(x: int) -> Iterator[int]:
        yield x
        raises(StopIteration())(x)

    for stage in (
        ops.Map(raises(StopIteration())),
        ops.Filter(raises(StopIteration())),
        ops.FlatMap(generator),
    ):
        _, found = collected(stage)
        assert isinstance(found, RuntimeError) and "StopIteration" in str(found)


def test_stop_iteration_in_a_data_set_or_a_collation_never_ends_an_epoch_early() -> None:
    class Data:
        def __len__(self) -> int:
            return 6

        __getitem__ = staticmethod(raises(StopIteration()))

    def collate(items: list[int]) -> list[int]:
        raise StopIteration

    for source, stage in (
        (ops.FromSequence(Data()), abs),
        (ops.FromIterable(range(6)), ops.Batch(2, collate=collate)),
    ):
        graph = pg.Graph("stop")
        graph.add(source).then(stage)
        with graph.loader() as loader, pytest.raises(RuntimeError, match="StopIteration"):
            list(loader)


def test_a_generator_that_fails_midway_has_given_what_came_before() -> None:
    def source() -> Iterator[int]:
        yield from (1, 2)
        raise Particular(1, reason="midway")

    got, found = collected(abs, source=source)
    assert got == [1, 2] and isinstance(found, Particular)
    assert "item 2 of this rank" in found.__notes__[0]


def test_a_task_that_cancels_itself_is_an_error_that_can_be_skipped() -> None:
    assert collected(raises_later(asyncio.CancelledError()), on_error=pg.Skip(1)) == ([0, 1, 2, 4, 5], None)


def test_a_timeout_inside_an_async_function_is_that_items_error() -> None:
    async def slow(x: int) -> int:
        async with asyncio.timeout(None if x != 3 else 0):
            await (asyncio.Event().wait() if x == 3 else asyncio.sleep(0))
        return x

    got, found = collected(slow, workers=3)
    assert got == [0, 1, 2] and isinstance(found, TimeoutError)


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


def test_half_made_children_of_a_failing_flat_map_are_kept_once_under_skip_and_retry() -> None:
    tries = []

    def pair(x: int) -> Iterator[int]:
        yield x
        tries.append(x)
        if x == 3 and len(tries) < 6:
            raise OSError("half")
        yield x + 100

    whole = [y for x in range(6) for y in (x, x + 100)]
    assert collected(ops.FlatMap(pair), on_error=pg.Retry(5)) == (whole, None)


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf])
def test_mix_refuses_weights_that_leave_an_input_out(weight: float) -> None:
    with pytest.raises(pg.errors.GraphError, match="weights must be positive numbers"):
        ops.Mix([1, weight])
