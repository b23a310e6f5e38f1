"""Operators made of user functions: Map, Filter, FlatMap."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from itertools import islice
from types import CoroutineType
from typing import Any, final

from pipegraph import concurrency
from pipegraph.bundle import DROPPED, Bundle
from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator, Traits
from pipegraph.engine.activity import Cancelled
from pipegraph.errors import GraphError, shown
from pipegraph.event_loop import LoopThread
from pipegraph.global_generators import Draws, enter_worker
from pipegraph.parameters import function_name, iterator_of, names_taken, not_awaited
from pipegraph.tree import copy_containers


def _takes_rng(function: Callable[..., Any]) -> bool:
    if isinstance(function, functools.partial) and "rng" in function.keywords:
        return False  # its user's own
    return "rng" in names_taken(function)


def _stem(function: Any) -> str:
    name = function_name(function).partition("(")[0].rpartition(".")[2]
    return name if name.isidentifier() else "map"


class _EventLoop:
    """One event loop in a thread of its own, shared by a stage's workers in one loader; the last to leave ends it."""

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._users = 0
        self._loop: LoopThread | None = None
        self._calls: set[Future[Any]] = set()
        self._cancelled = False

    def enter(self, stage: str) -> None:
        with self._lock:
            self._users += 1
            if self._loop is None:
                begin = functools.partial(enter_worker, 0, stage)
                self._loop = LoopThread(f"pipegraph-async-{stage}", begin)

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users or self._loop is None:
                return
            loop, self._loop = self._loop, None
        loop.end()
        loop.join()

    def call(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        with self._lock:
            assert self._loop is not None
            if self._cancelled:
                raise Cancelled
            call = self._loop.submit(_outcome(function))
            self._calls.add(call)
        try:
            result, error = call.result()
        except CancelledError:
            if self._cancelled:
                raise Cancelled from None
            raise RuntimeError("the coroutine was cancelled by its own code") from None
        finally:
            with self._lock:
                self._calls.discard(call)
        if error is not None:
            try:
                raise error
            finally:
                del error
        return result

    def cancel(self) -> None:
        """End the calls under way, and those to come until :meth:`uncancel`."""
        with self._lock:
            self._cancelled = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def uncancel(self) -> None:
        self._cancelled = False


async def _outcome(function: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[Any, BaseException | None]:
    """The result, or what would end the event loop, and with it every other call, if a task raised it."""
    try:
        # Made here: of a task that is cancelled before its first step, Python would warn that nobody awaited it.
        return await function(), None
    except (KeyboardInterrupt, SystemExit) as error:
        return None, error


def _callables(function: Any) -> tuple[Any, Any]:
    return function, getattr(function, "__call__", None)  # noqa: B004


class _Function(Operator):
    """What the three share: calling the function with what it asks for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise GraphError(f"{type(self).__name__}: expected a function, got {shown(function)}")
        if type(self) is not FlatMap and any(map(inspect.isgeneratorfunction, _callables(function))):
            raise GraphError(
                f"{type(self).__name__}: {_stem(function)} is a generator function, whose items would get lost; place "
                "it as ops.FlatMap(function), or let it return a value"
            )
        self.random = _takes_rng(function)
        self.function = function
        self._generator: Any = None
        if self.random:
            from pipegraph.randomness import generator

            self._generator = generator
        self.depends_on = "item|random" if self.random else "item"
        self._is_async = any(map(inspect.iscoroutinefunction, _callables(function)))
        self._async: _EventLoop | None = None
        self._context = Context("")
        self._draws = Draws()

    def config(self) -> dict[str, Any]:
        return {"function": function_name(self.function)}

    @property
    def traits(self) -> Traits:
        blocks = self.kind == "map" and not self._is_async
        return Traits(seeds_itself=True, blocks=blocks, functions=(self.function,))

    def open(self, context: Context) -> None:
        self._context = context
        self._draws = Draws(context.seed, context.stage)
        if self._is_async:
            self._async = context.share("event loop", _EventLoop)
            self._async.enter(context.stage)

    def close(self) -> None:
        if self._async is not None:
            self._async.leave()

    def cancel(self) -> None:
        if self._async is not None:
            self._async.cancel()

    def uncancel(self) -> None:
        if self._async is not None:
            self._async.uncancel()

    def call(self, chunk: Chunk) -> Any:
        """The function's result for a chunk's data."""
        if self._async is None:
            self._draws.one(chunk.epoch, chunk.lineages[0])
        else:  # several are in work at once, each in a task of its own
            Draws(self._context.seed, self._context.stage).one(chunk.epoch, chunk.lineages[0])
        given: dict[str, Any] = {}
        if self.random:
            given["rng"] = self._generator(
                self._context.seed, chunk.epoch, chunk.lineages[0], self._context.stage
            )
        if self._async is not None:
            return self._async.call(functools.partial(self.function, chunk.data, **given))
        result = self.function(chunk.data, **given)
        if result.__class__ is CoroutineType:
            raise not_awaited(result)
        return result


@final
class Map(_Function):
    """Call a function on each item: ``Map(fn)``.

    Return a new array for each item: what waits in a queue is not copied.

    Args:
        function: gets the plain item (a sample or a batch); with a parameter ``rng`` also the item's own
            ``numpy.random.Generator``. An ``async def`` function runs on the stage's event loop, as many at once as the
            stage has workers.

    Raises:
        GraphError: ``function`` is not callable, or is a generator function.
    """

    @property
    def name(self) -> str:
        return _stem(self.function)

    def work_into(self, made: list[Any], bundle: Bundle, start: int) -> None:
        if self.random:
            for index, _ in enumerate(islice(bundle.data, start, None), start):
                made.append(self.call(bundle.one(index)))
            return
        function, draws, add = self.function, self._draws, made.append
        for item in draws.rows(bundle.epoch, bundle.lineages, made, start, bundle.data):
            out = function(item)
            if out.__class__ is CoroutineType:
                raise not_awaited(out)
            add(out)
        draws.over()

    def process(self, chunk: Chunk) -> Chunk:
        data = chunk.data
        if data.__class__ is dict and "key" in data:
            chunk.keys = chunk.keys  # identity stays with the sample, also when the function drops the field
        chunk.data = self.call(chunk)
        return chunk


@final
class Filter(_Function):
    """Keep the items for which ``function`` returns a true value.

    Args:
        function: as in :class:`Map`; its result is taken as true or false.

    Raises:
        GraphError: ``function`` is not callable.
    """

    one_to_one = False

    def work_into(self, made: list[Any], bundle: Bundle, start: int) -> None:
        if self.random:
            for index, item in enumerate(islice(bundle.data, start, None), start):
                made.append(item if self.call(bundle.one(index)) else DROPPED)
            return
        function, draws, add = self.function, self._draws, made.append
        for item in draws.rows(bundle.epoch, bundle.lineages, made, start, bundle.data):
            kept = function(item)
            if kept.__class__ is CoroutineType:
                raise not_awaited(kept)
            add(item if kept else DROPPED)
        draws.over()

    def process(self, chunk: Chunk) -> Chunk | None:
        return chunk if self.call(chunk) else None


@final
class FlatMap(_Function):
    """Call a function that returns or yields any number of items for each item.

    The containers of each yielded item are copied (a shallow copy). So the function may yield the same object several
    times, or change it and yield it again.

    Args:
        function: as in :class:`Map`; it returns an iterable of items, or yields them.

    Raises:
        GraphError: ``function`` is not callable.
        TypeError: while it runs: ``function`` returned something that cannot be iterated.
    """

    kind = "expand"
    needs = "sample|batch"
    gives = "sample"
    one_to_one = False

    def process(self, chunk: Chunk) -> Iterator[Chunk]:
        items = iterator_of(self.call(chunk))
        for index, item in enumerate(self._draws.each(items, chunk.epoch, chunk.lineages[0])):
            item = copy_containers(item)
            child = chunk.child(index, item)
            if item.__class__ is dict and "key" in item:
                child.keys = (item["key"],)
            yield child
