"""Kinds of data and settings that a training loop changes between epochs, and that the next epoch must have."""

import array
import collections
import ctypes
import multiprocessing
import types

import pytest

import pipegraph as pg
from pipegraph import operators as ops

EPOCHS = 3


def passes(graph, change):
    """What each epoch gives; ``change(epoch)`` is called before it."""
    found = []
    with graph.loader(epochs=EPOCHS) as loader:
        for epoch in range(EPOCHS):
            change(epoch)
            found.append(list(loader))
    return found


def number_in(data):
    data[1] = data[1] + 1


def replay(data):
    data.append(data[-1] + 1)


BUFFERS = {
    "deque": (lambda: collections.deque(range(5), maxlen=5), replay),
    "array": (lambda: array.array("i", range(5)), number_in),
    "bytearray": (lambda: bytearray(range(5)), number_in),
    "memoryview": (lambda: memoryview(bytearray(range(5))), number_in),
    "large bytearray": (lambda: bytearray(1000), number_in),
    "ctypes": (lambda: (ctypes.c_int * 5)(*range(5)), number_in),
    "shared": (lambda: multiprocessing.Array("i", range(5)), number_in),
}


class Holding:
    """A dataset that holds its items in an attribute."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


@pytest.mark.parametrize("held", [False, True], ids=["itself", "held"])
@pytest.mark.parametrize("kind", BUFFERS)
def test_the_next_epoch_has_what_the_loop_has_put_into_a_buffer(kind, held):
    make, change = BUFFERS[kind]
    data, wanted = make(), []

    def between(epoch):
        if epoch:
            change(data)
        wanted.append(list(data))

    graph = pg.Graph("buffers")
    graph.add(ops.FromSequence(Holding(data) if held else data))
    assert passes(graph, between) == wanted


class Rates:
    """Settings, as a module keeps them."""

    rate = 0


RATES = Rates()
SPACE = types.SimpleNamespace(rate=0)


class ByClass:
    """A function whose setting is a class attribute."""

    rate = 0

    def __call__(self, item):
        return item + self.rate


def by_class_of_the_module(item):
    return item + Rates.rate


def by_object_of_the_module(item):
    return item + RATES.rate


def by_namespace(item):
    return sum([each + SPACE.rate for each in [item]])


def by_closure(kept):
    return lambda item: item + max(kept)


def setting(holder):
    return lambda epoch: setattr(holder, "rate", epoch)


def in_set(kept):
    def change(epoch):
        kept.clear()
        kept.add(epoch)

    return change


def in_value(value):
    return lambda epoch: setattr(value, "value", epoch)


def in_mapping(kept):
    return lambda epoch: kept.update({7: epoch})


def settings():
    kept, value, mapping = {0}, multiprocessing.Value("i"), dict.fromkeys(range(1000), 0)
    return {
        "class attribute": (ByClass(), setting(ByClass)),
        "class of the module": (by_class_of_the_module, setting(Rates)),
        "object of the module": (by_object_of_the_module, setting(RATES)),
        "namespace": (by_namespace, setting(SPACE)),
        "set": (by_closure(kept), in_set(kept)),
        "shared value": (lambda item: item + value.value, in_value(value)),
        "large mapping": (lambda item: item + mapping[7], in_mapping(mapping)),
    }


@pytest.mark.parametrize("kind", settings())
def test_the_next_epoch_is_made_with_what_the_loop_has_set(kind):
    function, change = settings()[kind]
    graph = pg.Graph("settings")
    graph.add(ops.FromSequence(range(4))).then(function)
    try:
        assert passes(graph, change) == [[item + epoch for item in range(4)] for epoch in range(EPOCHS)]
    finally:
        ByClass.rate = Rates.rate = SPACE.rate = 0
        RATES.__dict__.pop("rate", None)
