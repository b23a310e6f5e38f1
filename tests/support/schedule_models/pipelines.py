"""Models of whole loaders: every kind of graph, with the habits and the mishaps of training loops."""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch
from scheduler.model import Model

import pipegraph as pg
from pipegraph import concurrency, operators as ops
from pipegraph.profile.search import Tuning

REFERENCES: dict[Any, list[list[Any]]] = {}
"""What each graph delivers in each epoch, made inline and outside of schedules."""


class Broken(Exception):
    """What a user's function raises."""


def add_one(item: Any) -> Any:
    return item + 1


def triple(item: Any) -> Any:
    return item * 3


def unchanged(item: Any) -> Any:
    return item


def even(item: Any) -> bool:
    return item % 2 == 0


def twice(item: Any) -> list[Any]:
    return [item, item + 100]


def parity(item: Any) -> int:
    return int(item % 2)


class LoaderModel(Model):
    """One loader in the hands of one training loop.

    Every epoch delivers exactly what the inline reference does, in its order where the graph is ordered. A state taken
    at any switch point, by any thread, resumes with exactly the rest; so does one after a break, an error, Ctrl-C, a
    close by another thread. After ``close`` no thread is left.
    """

    epochs = 2
    ordered = True
    memory_limit = "100 MB"

    def graph(self, variant: int) -> pg.Graph:
        """The graph; ``variant`` changes placement and sizes only."""
        raise NotImplementedError

    # -- the reference -------------------------------------------------------------------------

    @classmethod
    def prepare(cls) -> None:
        """Make the reference; outside of schedules."""
        Failing.raises, Failing.returns = False, None
        torch.set_num_threads(1)  # then no worker starts a thread to set it
        if cls not in REFERENCES:
            model = cls.__new__(cls)
            with model.graph(0).loader(epochs=cls.epochs) as loader:
                REFERENCES[cls] = [[plain(item) for item in loader] for _ in range(cls.epochs)]
            with model.graph(1).loader(epochs=1) as loader:  # imports what a schedule must not import
                list(loader)
                json.dumps(loader.state_dict())

    def expect(self, epoch: int, begin: int, got: list[Any]) -> None:
        """``got`` is a whole epoch's rest from item ``begin`` on."""
        expected = REFERENCES[type(self)][epoch][begin:]
        if not self.ordered:
            got, expected = sorted(got), sorted(expected)
        assert got == expected, f"epoch {epoch} from {begin}: {got}, not {expected}"

    # -- one schedule --------------------------------------------------------------------------

    def run(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            habits = [
                self.whole,
                self.breaks,
                self.resumes,
                self.closes,
                self.fails,
                self.hangs,
                self.is_interrupted,
            ]
            self.draw.choice(habits)()

    def loader(self, fails: bool = False) -> Any:
        Failing.raises, Failing.returns = fails, None
        graph = self.graph(self.draw.randrange(1, 100))
        # A loader that was made for fewer passes reads ahead to the last of these only.
        return graph.loader(epochs=self.draw.choice([1, self.epochs, None]), memory_limit=self.memory_limit)

    def whole(self) -> None:
        with self.loader() as loader:
            for epoch in range(self.epochs):
                self.expect(epoch, 0, [plain(item) for item in loader])

    def breaks(self) -> None:
        """Leave the first pass early, then run the next one; or go on from the state."""
        stop = self.draw.randrange(4)
        with self.loader() as loader:
            got = self.some(loader, stop)
            state = json.loads(json.dumps(loader.state_dict()))
            self.expect(1, 0, [plain(item) for item in loader])
        self.resume(state, 0, got)

    def resumes(self) -> None:
        """Another thread takes a state at some moment; nobody knows after which item."""
        states: list[Any] = []

        def take() -> None:
            states.append(loader.state_dict())

        with self.loader() as loader:
            taker = concurrency.Thread(target=take)
            got: list[list[Any]] = []
            began = self.draw.randrange(4)
            for _ in range(self.epochs):
                got.append([])
                for item in loader:
                    if began == 0:
                        taker.start()
                    began -= 1
                    got[-1].append(plain(item))
            if began >= 0:
                taker.start()
            taker.join()
        for epoch in range(self.epochs):
            self.expect(epoch, 0, got[epoch])
        state = json.loads(json.dumps(states[0]))
        with self.loader() as loader:
            loader.load_state_dict(state)
            epoch = loader.epoch
            rest = [plain(item) for item in loader] if epoch < self.epochs else []
        if epoch < self.epochs:
            whole = REFERENCES[type(self)][epoch]
            if self.ordered:
                assert rest == whole[len(whole) - len(rest) :], f"{rest} is no end of {whole}"
            else:
                assert set(rest) <= set(whole)
                assert len(set(rest)) == len(rest)

    def closes(self) -> None:
        """Another thread closes the loader in the middle."""
        with self.loader() as loader:
            closer = concurrency.Thread(target=loader.close)
            got = []
            try:
                for item in loader:
                    if not got:
                        closer.start()
                    got.append(plain(item))
            except pg.errors.LoaderClosedError:
                pass
            else:
                self.expect(0, 0, got)
                if not got:
                    closer.start()
            closer.join()
        if self.ordered:
            assert got == REFERENCES[type(self)][0][: len(got)]

    def fails(self) -> None:
        """A user's function raises at one item."""
        got: list[Any] = []
        with self.loader(fails=True) as loader:
            try:
                for item in loader:
                    got.append(plain(item))
                raise AssertionError(f"the error was lost: {got}")
            except Broken:
                pass
            state = json.loads(json.dumps(loader.state_dict()))
        if self.ordered:
            assert got == REFERENCES[type(self)][0][: len(got)]
        self.resume(state, 0, got)

    def hangs(self) -> None:
        """A user's function does not return until another thread's ``close`` has given up on it."""
        loader = self.loader()
        Failing.returns = returns = concurrency.Event()

        def close() -> None:
            try:
                loader.close()
            except pg.errors.PipegraphWarning:  # StuckWorker
                pass
            returns.set()

        closer = concurrency.Thread(target=close)
        got: list[Any] = []
        try:
            closer.start()
            for item in loader:
                got.append(plain(item))
        except pg.errors.LoaderClosedError:
            pass
        closer.join()
        Failing.returns = None
        loader.close()
        if self.ordered:
            assert got == REFERENCES[type(self)][0][: len(got)]

    def is_interrupted(self) -> None:
        """Ctrl-C at some step of the consumer, before, in, or after an item; then the rest from the state."""
        with self.loader() as loader:
            got: list[Any] = []
            try:
                self.interrupt_in(self.draw.randrange(400))
                for item in loader:
                    got.append(plain(item))
                self.interrupt_in(None)
            except KeyboardInterrupt:
                pass
            self.interrupt_in(None)
            state = json.loads(json.dumps(loader.state_dict()))
            with self.loader() as other:
                other.load_state_dict(state)
                epoch = other.epoch
                rest = [plain(item) for item in other] if epoch < self.epochs else []
            if epoch == 0:
                self.expect_but_one(got, rest)
            else:
                self.expect_but_one(got, [])
                self.expect(1, 0, rest)
            again = loader.epoch
            if again < self.epochs:
                self.expect(again, 0, [plain(item) for item in loader])

    def expect_but_one(self, got: list[Any], rest: list[Any]) -> None:
        """The whole of epoch 0; Ctrl-C may come when an item is counted as delivered, and the loop has not got it."""
        whole = REFERENCES[type(self)][0]
        missing = len(whole) - len(got) - len(rest)
        if missing == 1 and self.ordered:
            got = [*got, whole[len(got)]]
        elif missing == 1:
            got = [*got, *(set(whole) - set(got) - set(rest))]
        self.expect(0, 0, got + rest)

    # -- steps ---------------------------------------------------------------------------------

    def some(self, loader: Any, stop: int) -> list[Any]:
        """The first items of a pass; the pass is left after ``stop`` of them."""
        got: list[Any] = []
        for item in loader:
            got.append(plain(item))
            if len(got) > stop:
                break
        return got

    def resume(self, state: Any, epoch: int, got: list[Any]) -> None:
        """A fresh loader delivers exactly what is left after ``got``."""
        with self.loader() as loader:
            loader.load_state_dict(state)
            if loader.epoch > epoch:
                self.expect(epoch, 0, got)
                return
            rest = [plain(item) for item in loader]
        self.expect(epoch, 0, got + rest)


def plain(item: Any) -> Any:
    """Comparable and hashable."""
    if isinstance(item, dict):
        return tuple(sorted((key, plain(value)) for key, value in item.items()))
    if hasattr(item, "tolist"):
        return plain(item.tolist())
    if isinstance(item, list | tuple):
        return tuple(plain(each) for each in item)
    return item


class Failing:
    """A function that raises for one item; while ``raises`` is set, if it depends on that."""

    raises = False
    returns: Any = None
    """An event for which the item waits, in schedules in which the function hangs."""

    def __init__(self, function: Any, at: Any, always: bool = False) -> None:
        self.function = function
        self.at = at
        self.always = always

    def __call__(self, item: Any) -> Any:
        if item == self.at and Failing.returns is not None:
            Failing.returns.wait()
        if item == self.at and (self.always or Failing.raises):
            raise Broken(f"item {item}")
        return self.function(item)


def mapped(function: Any, at: Any) -> ops.Map:
    """A map that fails at an item in the schedules in which a function does."""
    return ops.Map(Failing(function, at))


class ThreeStages(LoaderModel):
    """A source and two maps with one worker each: what the rate of schedules is measured on."""

    def graph(self, variant: int) -> pg.Graph:
        graph = pg.Graph("three")
        node = graph.add(ops.FromIterable(range(6)), name="source")
        node = node.then(mapped(add_one, 3), name="first", capacity=1 + variant % 3)
        node.then(ops.Map(triple), name="second", capacity=1 + variant // 3 % 2)
        return graph


class SeveralWorkers(LoaderModel):
    """Workers of an ordered stage finish out of order; a filter leaves gaps."""

    def graph(self, variant: int) -> pg.Graph:
        graph = pg.Graph("several")
        node = graph.add(ops.FromSequence(range(8)), name="source", workers=1 + variant % 2)
        node = node.then(mapped(add_one, 4), name="map", workers=1 + variant % 3, capacity=1 + variant % 2)
        node = node.then(ops.Filter(even), name="filter", backend="inline" if variant % 5 == 0 else "thread")
        node.then(ops.Map(triple), name="last", workers=1 + variant // 2 % 2, capacity=1 + variant // 4 % 3)
        return graph


class Units(LoaderModel):
    """Bundles of small rows below and above a slow stage."""

    def graph(self, variant: int) -> pg.Graph:
        graph = pg.Graph("units")
        node = graph.add(ops.FromSequence(range(24)), name="source")
        node = node.then(mapped(add_one, 13), name="map", workers=1 + variant % 2)
        node.then(ops.Batch(4), name="batch")
        return graph


class Completion(LoaderModel):
    """Items leave as they finish; states count samples."""

    ordered = False

    def graph(self, variant: int) -> pg.Graph:
        graph = pg.Graph("completion")
        node = graph.add(ops.FromSequence(range(7)), name="source")
        node = node.then(
            mapped(add_one, 4), name="map", workers=1 + variant % 3, ordered=False, capacity=1 + variant % 2
        )
        node.then(ops.Map(triple), name="last", workers=1 + variant // 3 % 2)
        return graph


class CompletionBelow(Completion):
    """What fails is the last item of the stage above: its failure may not be overtaken by the end of the epoch."""

    def graph(self, variant: int) -> pg.Graph:
        graph = pg.Graph("below")
        node = graph.add(ops.FromSequence(range(5)), name="source")
        node = node.then(mapped(add_one, 4), name="before", workers=1 + variant % 2)
        node.then(ops.Map(triple), name="map", workers=1 + variant % 3, ordered=False)
        return graph


class RouteToMerge(LoaderModel):
    """Two branches of different speed, together again in turn."""

    def graph(self, variant: int) -> pg.Graph:
        graph = pg.Graph("route")
        node = graph.add(ops.FromSequence(range(7)), name="source")
        routed = graph.add(ops.Route(parity, 2), node, name="route")
        left = graph.add(mapped(add_one, 4), routed[0], name="left", workers=1 + variant % 2)
        right = graph.add(ops.Map(triple), routed[1], name="right", capacity=1 + variant % 3)
        graph.add(ops.Merge(), left, right, name="merge")
        return graph


class Mixed(LoaderModel):
    """A draw from two sources until both have ended."""

    def graph(self, variant: int) -> pg.Graph:
        graph = pg.Graph("mix", seed=3)
        left = graph.add(ops.FromIterable(range(4)), name="left")
        right = graph.add(ops.FromSequence(range(10, 13)), name="right")
        node = graph.add(ops.Mix([2, 1], stop="all"), left, right, name="mix", capacity=1 + variant % 3)
        node.then(mapped(add_one, 2), name="map", workers=1 + variant % 2)
        return graph


class Diamond(LoaderModel):
    """A fan-out whose branches meet again at different rates: queues grow."""

    def graph(self, variant: int) -> pg.Graph:
        graph = pg.Graph("diamond")
        node = graph.add(ops.FromSequence(range(6)), name="source")
        slow = node.then(ops.Batch(3), name="batch", capacity=1).then(ops.Unbatch(), name="rows")
        fast = node.then(mapped(add_one, 3), name="map", capacity=1 + variant % 2)
        graph.add(ops.Zip(), slow, fast, name="zip")
        return graph


class Regrouped(LoaderModel):
    """Flat maps, windows of a shuffle, batches with a remainder."""

    def graph(self, variant: int) -> pg.Graph:
        graph = pg.Graph("regroup", seed=5)
        node = graph.add(ops.FromSequence(range(5)), name="source")
        node = node.then(ops.FlatMap(twice), name="twice", workers=1 + variant % 2)
        node = node.then(ops.Shuffle(4), name="shuffle", capacity=1 + variant % 3)
        node = node.then(mapped(add_one, 3), name="map", workers=1 + variant // 2 % 2)
        node.then(ops.Batch(3), name="batch")
        return graph


class SkippedRows(LoaderModel):
    """Failures that a policy leaves out, within a budget."""

    def graph(self, variant: int) -> pg.Graph:
        graph = pg.Graph("skip")
        node = graph.add(ops.FromSequence(range(8)), name="source")
        node = node.then(
            ops.Map(Failing(add_one, 5, always=True)),
            name="map",
            workers=1 + variant % 2,
            on_error=pg.Skip(4),
            capacity=2,
        )
        node.then(mapped(triple, 4), name="last")
        return graph


class LittleMemory(LoaderModel):
    """Arrays that hardly fit into the queues."""

    memory_limit = "40 KB"

    def graph(self, variant: int) -> pg.Graph:
        graph = pg.Graph("memory")
        node = graph.add(ops.FromSequence(range(6)), name="source", capacity=4)
        node = node.then(ops.Map(array_of), name="array", workers=1 + variant % 2)
        node = node.then(ops.Map(first_of), name="first", workers=1 + variant // 2 % 2, capacity=4)
        node.then(mapped(add_one, 3), name="map")
        return graph


def array_of(item: Any) -> Any:
    import numpy as np

    return np.full(1000, item)


def first_of(item: Any) -> Any:
    return int(item[0])


class Resized(LoaderModel):
    """A tuner gives stages workers and room, and takes them away, before each item."""

    def graph(self, variant: int) -> pg.Graph:
        graph = pg.Graph("resized")
        node = graph.add(ops.FromSequence(range(8)), name="source")
        node = node.then(mapped(add_one, 5), name="map", workers="auto")
        node.then(ops.Map(triple), name="last", workers="auto")
        return graph

    def loader(self, fails: bool = False) -> Any:
        Failing.raises = fails
        loader = self.graph(1).loader(epochs=self.epochs, memory_limit=self.memory_limit, autotune=True)
        loader._tuner = Sizes(self.draw)
        return loader


class Sizes:
    """In place of the tuner: another size of a drawn stage before each item."""

    tuning = Tuning()

    def __init__(self, draw: Any) -> None:
        self._draw = draw
        self._crew: Any = None

    def begins(self, loader: Any, crew: Any) -> None:
        self._crew = crew

    def asked(self, items: int) -> None:
        stage = self._draw.choice(["map", "last"])
        self._crew.resize(stage, self._draw.randrange(1, 4))
        self._crew.set_capacity(stage, self._draw.randrange(1, 4))
