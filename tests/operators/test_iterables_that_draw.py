"""Iterables with a state that draw from the global generators, in ``__iter__`` and item by item, resume exactly."""

import json
import random
from itertools import islice

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import StateError

pytestmark = pytest.mark.usefixtures("no_leaks")

SIZE = 150


def drawn():
    return int(torch.randint(1_000_000, ()))


class Stateful:
    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Order(Stateful):
    """Its order is drawn before the first item."""

    def order(self):
        return torch.randperm(SIZE).tolist()

    def value(self, number):
        return number

    def __iter__(self):
        for number in self.order()[self.at :]:
            self.at += 1
            yield self.value(number)
        self.at = 0


class OrderAndItems(Order):
    """Each item draws too."""

    def value(self, number):
        return [number, drawn()]


class Items(OrderAndItems):
    """Only the items draw."""

    def order(self):
        return range(SIZE)


class SomeItems(OrderAndItems):
    """Not all items draw, and some draw more."""

    def value(self, number):
        return [number, *(drawn() for _ in range(number % 3))]


class Batches(Items):
    """A batch at a time is drawn, and again from its first row where a state lies in it."""

    def __iter__(self):
        while self.at < SIZE:
            batch = [drawn() for _ in range(40)]
            for number in batch[self.at % 40 :][: SIZE - self.at]:
                self.at += 1
                yield number
        self.at = 0


class AtOnce(OrderAndItems):
    """``__iter__`` is no generator: it draws when it is called."""

    def __iter__(self):
        return self.drawing(self.order()[self.at :])

    def drawing(self, numbers):
        for number in numbers:
            self.at += 1
            yield self.value(number)
        self.at = 0


class ResetsLate(OrderAndItems):
    """Its state behind the last item is one without items, behind which it begins anew."""

    begin = 0

    def __iter__(self):
        order = self.order()
        begin, self.begin = self.begin, 0
        for self.at in range(begin + 1, SIZE + 1):
            yield self.value(order[self.at - 1])

    def load_state_dict(self, state):
        self.begin = state["at"]


class Iterates:
    """The iterator has the state."""

    def __iter__(self):
        return Drawing()


class Drawing(Stateful):
    order = None

    def __iter__(self):
        return self

    def __next__(self):
        if self.order is None:
            self.order = torch.randperm(SIZE).tolist()
        if self.at == SIZE:
            raise StopIteration
        self.at += 1
        return [self.order[self.at - 1], drawn()]


class SetsEpoch(OrderAndItems):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def value(self, number):
        return [self.epoch, number, drawn()]


class OfOthers(Order):
    """It draws from NumPy's and Python's generators, which in processes are the item's too."""

    def order(self):
        numbers = np.random.permutation(SIZE).tolist()
        random.shuffle(numbers)
        return numbers


class OfOthersAndItems(OfOthers):
    def value(self, number):
        return [number, random.random(), float(np.random.rand()), drawn()]


def without_state():
    for number in torch.randperm(SIZE).tolist():
        yield [number, drawn()]


KINDS = {
    each.__name__: each
    for each in (Order, OrderAndItems, Items, SomeItems, Batches, AtOnce, ResetsLate, Iterates, SetsEpoch)
}
KINDS["without_state"] = lambda: without_state
WAYS = {
    "thread": ({}, {}),
    "process": ({"backend": "process"}, {}),
    "isolated": ({}, {"isolate": True}),
}


def loader(items, way="thread", epochs=2, **options):
    stage, more = WAYS[way]
    graph = pg.Graph("g", seed=1)
    graph.add(ops.FromIterable(items), **stage)
    return graph.loader(epochs=epochs, **more, **options)


def two_epochs(made, way="thread"):
    with loader(made(), way) as whole:
        return [list(whole), list(whole)]


def left(made, taken, way="thread", state=None):
    """A state behind ``taken`` items, and behind these what is left of two epochs."""
    with loader(made(), way) as begun:
        if state is not None:
            begun.load_state_dict(state)
        head = list(islice(begun, taken))
        return json.loads(json.dumps(begun.state_dict())), head


@pytest.mark.parametrize("kind", KINDS)
def test_they_resume_in_the_order_that_was_drawn(kind):
    made = KINDS[kind]
    epochs = two_epochs(made)
    assert epochs[0] != epochs[1] and len(epochs[0]) == len(epochs[1]) == SIZE
    for taken in (0, 1, 9, 64, 70, 140, SIZE):
        state, head = left(made, taken)
        with loader(made()) as resumed:
            resumed.load_state_dict(state)
            assert [head + list(resumed), list(resumed)] == epochs, taken
        if taken in (9, 70):  # and once more
            state, more = left(made, 65, state=state)
            with loader(made()) as resumed:
                resumed.load_state_dict(state)
                assert [head + more + list(resumed), list(resumed)] == epochs, taken


@pytest.mark.parametrize("kind", ["OrderAndItems", "SetsEpoch"])
def test_a_state_of_a_later_epoch_too(kind):
    made = KINDS[kind]
    epochs = two_epochs(made)
    for taken in (0, 9, 70):
        with loader(made()) as begun:
            list(begun)
            head = list(islice(begun, taken))
            state = begun.state_dict()
        with loader(made()) as resumed:
            resumed.load_state_dict(state)
            assert (head if resumed.epoch else []) + list(resumed) == epochs[1], taken


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (Order, "process"),
        (OrderAndItems, "process"),
        (SomeItems, "process"),
        (OfOthers, "process"),
        (OfOthersAndItems, "process"),
        (OrderAndItems, "isolated"),
    ],
)
def test_in_processes_too(kind, way):
    epochs = two_epochs(kind, way)
    for taken in (9, 70):
        state, head = left(kind, taken, way)
        with loader(kind(), way) as resumed:
            resumed.load_state_dict(state)
            assert [head + list(resumed), list(resumed)] == epochs, taken


@pytest.mark.parametrize("kind", ["Order", "OrderAndItems", "SomeItems"])
def test_at_another_world_size_too(kind):
    made = KINDS[kind]
    whole = two_epochs(made)[0]
    for taken in (3, 40):
        states, found = [], []
        for rank in range(2):
            with loader(made(), rank=rank, world_size=2, equal_steps=False) as begun:
                found += islice(begun, taken)
                states.append(begun.state_dict())
        with loader(made()) as resumed:
            resumed.load_state_dict(states)
            found += resumed
        assert sorted(map(repr, found)) == sorted(map(repr, whole)), taken


def test_only_what_is_left_is_read_where_the_draws_tell_what_was_drawn_before():
    class Counted(OrderAndItems):
        reads = 0

        def value(self, number):
            self.reads += 1
            return super().value(number)

    state, head = left(Counted, 70)
    items = Counted()
    with loader(items, epochs=1) as resumed:
        resumed.load_state_dict(state)
        assert len(head + list(resumed)) == SIZE
    assert items.reads == SIZE - 64


def test_behind_a_pass_that_was_left_early_what_is_not_known_is_refused():
    items = Order()
    with loader(items, epochs=3) as begun:
        next(iter(begun))
        begun.set_epoch(1)
        next(iter(begun))
        state = begun.state_dict()
    with loader(Order(), epochs=3) as resumed:
        resumed.load_state_dict(state)
        with pytest.raises(StateError, match="draws random numbers when it begins.*generator of its own"):
            list(resumed)


class Sampler(ResetsLate):
    def __len__(self):
        return SIZE

    def value(self, number):
        return number


def test_samplers_too():
    def made():
        graph = pg.Graph("g", seed=1)
        graph.add(ops.FromSequence(range(SIZE), sampler=Sampler()))
        return graph.loader(epochs=2)

    with made() as begun:
        first, passing = list(begun), iter(begun)
        head = list(islice(passing, 3))
        state = begun.state_dict()
        second = list(passing)
    with made() as resumed:
        resumed.load_state_dict(state)
        assert list(resumed) == second
    assert len({*head, *second}) == SIZE and head + second != first


def test_the_generators_of_others_are_not_touched():
    before = torch.get_rng_state()
    two_epochs(OrderAndItems)
    assert torch.equal(torch.get_rng_state(), before)
