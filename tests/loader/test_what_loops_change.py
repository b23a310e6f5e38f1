"""Kinds of data and settings that a training loop changes between epochs, and that the next epoch must have."""

import array
import collections
import contextlib
import ctypes
import io
import multiprocessing
import sys
import types

import numpy as np
import pandas
import pyarrow
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import PipegraphWarning

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


def unmask(data):
    data.mask[1] = not data.mask[1]


BUFFERS = {
    "deque": (lambda: collections.deque(range(5), maxlen=5), replay),
    "array": (lambda: array.array("i", range(5)), number_in),
    "bytearray": (lambda: bytearray(range(5)), number_in),
    "memoryview": (lambda: memoryview(bytearray(range(5))), number_in),
    "large bytearray": (lambda: bytearray(1000), number_in),
    "ctypes": (lambda: (ctypes.c_int * 5)(*range(5)), number_in),
    "shared": (lambda: multiprocessing.Array("i", range(5)), number_in),
    "objects": (lambda: np.array([1, 2, 3], dtype=object), number_in),
    "mask": (lambda: np.ma.masked_array(np.arange(3), np.arange(3) == 1, fill_value=7), unmask),
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
        wanted.append(str(list(data)))

    graph = pg.Graph("buffers")
    graph.add(ops.FromSequence(Holding(data) if held else data))
    assert list(map(str, passes(graph, between))) == wanted


def test_the_next_epoch_has_what_the_loop_has_written_to_a_file_in_memory():
    file = io.BytesIO(b"abc")

    class Letters(Holding):
        def __getitem__(self, index):
            return self.items.getvalue()[index]

        def __len__(self):
            return 3

    graph = pg.Graph("letters")
    graph.add(ops.FromSequence(Letters(file)))
    assert passes(graph, lambda epoch: file.getbuffer().__setitem__(0, epoch)) == [
        [epoch, 98, 99] for epoch in range(EPOCHS)
    ]


class Rates:
    """Settings, as a module keeps them."""

    rate = 0


RATES = Rates()
SPACE = types.SimpleNamespace(rate=0)
MODULE = types.ModuleType("settings_of_loops")
MODULE.rate = 0


class ByClass:
    """A function whose setting is a class attribute."""

    rate = 0

    def __call__(self, item):
        return item + self.rate


def by_class_of_the_module(item):
    return item + Rates.rate


def by_object_of_the_module(item):
    return item + RATES.rate


def by_module(item):
    return item + MODULE.rate


def by_import(item):
    import settings_of_loops

    return item + settings_of_loops.rate


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


def in_list(kept):
    def change(epoch):
        kept[0] = torch.tensor([epoch]).to_sparse()

    return change


def settings():
    sparse = [torch.tensor([0]).to_sparse()]
    kept, value, mapping = {0}, multiprocessing.Value("i"), dict.fromkeys(range(1000), 0)
    return {
        "class attribute": (ByClass(), setting(ByClass)),
        "class of the module": (by_class_of_the_module, setting(Rates)),
        "object of the module": (by_object_of_the_module, setting(RATES)),
        "namespace": (by_namespace, setting(SPACE)),
        "another module": (by_module, setting(MODULE)),
        "module that it imports": (by_import, setting(MODULE)),
        "sparse tensor": (lambda item: item + int(sparse[0].to_dense()[0]), in_list(sparse)),
        "set": (by_closure(kept), in_set(kept)),
        "shared value": (lambda item: item + value.value, in_value(value)),
        "large mapping": (lambda item: item + mapping[7], in_mapping(mapping)),
    }


@pytest.mark.parametrize("kind", settings())
def test_the_next_epoch_is_made_with_what_the_loop_has_set(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE.__name__, MODULE)
    function, change = settings()[kind]
    graph = pg.Graph("settings")
    graph.add(ops.FromSequence(range(4))).then(function)
    try:
        assert passes(graph, change) == [[item + epoch for item in range(4)] for epoch in range(EPOCHS)]
    finally:
        ByClass.rate = Rates.rate = SPACE.rate = MODULE.rate = 0
        RATES.__dict__.pop("rate", None)


def test_the_next_epoch_is_read_by_what_the_open_of_an_interleave_reads_now():
    rates = Rates()
    graph = pg.Graph("interleaved")
    graph.add(ops.Interleave([0, 4], lambda first: [first + n + rates.rate for n in range(2)], cycle=1))
    assert passes(graph, setting(rates)) == [[n + epoch for n in (0, 1, 4, 5)] for epoch in range(EPOCHS)]


def mapped(path):
    np.arange(4).tofile(path)
    return np.memmap(path, np.int64, mode="r+")


def change_frame(frame, value):
    frame.loc[0, "n"] = value


TABLES = {
    "frame": (lambda _: pandas.DataFrame({"n": np.arange(4)}), ops.FromTable, change_frame),
    "arrow": (
        lambda _: np.arange(4),
        lambda array: ops.FromTable(pyarrow.table({"n": pyarrow.array(array)})),
        lambda array, value: array.__setitem__(0, value),
    ),
    "tokens": (
        lambda _: np.arange(4),
        lambda array: ops.FromTokens(array, 1),
        lambda array, value: array.__setitem__(0, value),
    ),
    "mapped tokens": (
        lambda folder: mapped(folder / "tokens"),
        lambda array: ops.FromTokens(array, 1),
        lambda array, value: array.__setitem__(0, value),
    ),
}


@pytest.mark.parametrize("kept", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("kind", TABLES)
def test_rows_in_memory_that_the_loop_changes_are_read_as_they_are_when_the_pass_begins(kind, kept, tmp_path):
    make, source, change = TABLES[kind]
    data = make(tmp_path)
    graph = pg.Graph("tables")
    rows = graph.add(source(data), name="rows").then(lambda row: int(np.sum(*row.values())), name="number")
    if kept:
        rows.then(ops.Cache("memory", "1 MB"))
    said = pytest.warns(PipegraphWarning, match="the data of stage 'rows' has changed")
    with said if kept else contextlib.nullcontext():
        found = passes(graph, lambda epoch: change(data, 10 * epoch))
    assert found == [[10 * epoch, 1, 2, 3] for epoch in range(EPOCHS)]
