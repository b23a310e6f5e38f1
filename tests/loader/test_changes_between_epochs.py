"""What the training loop changes between epochs is what the next one reads: samplers, iterables, data."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import PipegraphWarning
from pipegraph.fingerprints import fingerprint

EPOCHS = 4
WAYS = {
    "inline": {"backend": "inline"},
    "threads": {"workers": 2},
    "processes": {"workers": 2, "backend": "process"},
}


class Weights:
    """A sampler of one number, which the loop chooses."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        return iter([self.number] * 6)

    def __len__(self):
        return 6


class Numbers:
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def passes(graph, change, epochs=EPOCHS, **options):
    """The items of each epoch; ``change`` is called before each."""
    found = []
    with graph.loader(epochs=epochs, **options) as loader:
        for epoch in range(EPOCHS):
            change(epoch)
            found.append([int(item) for item in loader])
    return found


@pytest.mark.parametrize("epochs", [EPOCHS, None], ids=["four epochs", "endless"])
@pytest.mark.parametrize("way", WAYS)
def test_a_sampler_that_the_loop_changes_is_asked_when_its_pass_begins(way, epochs):
    sampler = Weights()
    graph = pg.Graph()
    graph.add(ops.FromSequence(range(100), sampler=sampler), **WAYS[way])
    found = passes(graph, lambda epoch: setattr(sampler, "number", 10 * epoch), epochs)
    assert found == [[10 * epoch] * 6 for epoch in range(EPOCHS)]


@pytest.mark.parametrize("way", ["inline", "threads"])
@pytest.mark.parametrize("kind", ["list", "generator function", "object"])
def test_an_iterable_that_the_loop_changes_is_asked_when_its_pass_begins(kind, way):
    items = [0, 1]

    class Items:
        def __iter__(self):
            return iter(items)

    given = {"list": items, "generator function": lambda: iter(list(items)), "object": Items()}[kind]
    graph = pg.Graph()
    node = graph.add(ops.FromIterable(given), backend=WAYS[way].get("backend", "thread"))
    node.then(abs, **WAYS[way])

    def change(epoch):
        if epoch:
            items[:] = [2 * epoch, 2 * epoch + 1]

    assert passes(graph, change) == [[2 * epoch, 2 * epoch + 1] for epoch in range(EPOCHS)]


@pytest.mark.parametrize("way", ["inline", "threads"])
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_data_that_the_loop_changes_or_extends_is_read_as_it_is_when_its_pass_begins(kind, way):
    data = Numbers(kind([0, 1, 2]))
    graph = pg.Graph()
    graph.add(ops.FromSequence(data), **WAYS[way])

    def change(epoch):
        if epoch == 1:
            data.items[1] = 10  # a better label
        if epoch == 2:
            data.items = kind([*map(int, data.items), 30])

    assert passes(graph, change) == [[0, 1, 2], [0, 10, 2], [0, 10, 2, 30], [0, 10, 2, 30]]


def test_set_epoch_and_a_resume_ask_the_sampler_anew_too():
    sampler = Weights()
    graph = pg.Graph()
    graph.add(ops.FromSequence(range(100), sampler=sampler), workers=2)
    with graph.loader(epochs=EPOCHS) as loader:
        list(loader)
        sampler.number = 7
        loader.set_epoch(3)
        assert list(loader) == [7] * 6
        state = loader.state_dict()
    with graph.loader(epochs=8) as loader:
        loader.load_state_dict(state)
        for number in (8, 9):
            sampler.number = number
            assert list(loader) == [number] * 6


def test_orders_of_our_own_still_read_across_the_boundary_of_epochs():
    read = threading.Semaphore(0)

    class Data(Numbers):
        def __getitem__(self, index):
            read.release()
            return super().__getitem__(index)

    graph = pg.Graph()
    graph.add(ops.FromSequence(Data([1, 2, 3])))
    with graph.loader(epochs=2) as loader:
        assert list(loader) == [1, 2, 3]
        for _ in range(6):
            assert read.acquire(timeout=60)
        assert list(loader) == [1, 2, 3]
        assert not read.acquire(blocking=False)  # what was read ahead is used


@pytest.mark.parametrize("isolate", [False, True], ids=["processes", "isolated"])
def test_a_replay_buffer_that_grows_is_not_seen_by_processes_and_the_error_says_which_backend_sees_it(
    isolate,
):
    way = "without isolate=True reads" if isolate else "backend='thread' reads"
    buffer = Numbers([0, 1, 2])
    graph = pg.Graph()
    graph.add(ops.FromSequence(buffer), **({} if isolate else {"backend": "process"}))
    with graph.loader(epochs=3, isolate=isolate) as loader:
        assert list(loader) == [0, 1, 2]
        buffer.items.append(3)
        with pytest.raises(
            pg.errors.GraphError, match=r"'fromsequence': the length of its data \(3, now 4\) .*" + way
        ):
            list(loader)


def test_a_sampler_of_another_length_is_not_seen_by_an_isolated_loader_and_is_refused():
    class First:
        count = 4

        def __len__(self):
            return self.count

        def __iter__(self):
            return iter(range(self.count))

    sampler = First()
    graph = pg.Graph()
    graph.add(ops.FromSequence(range(50), sampler=sampler))
    with graph.loader(epochs=3, isolate=True) as loader:
        assert list(loader) == [0, 1, 2, 3]
        sampler.count = 6
        with pytest.raises(
            pg.errors.GraphError, match=r"the length of its sampler \(4, now 6\) .*without isolate"
        ):
            list(loader)


def in_place(item):
    item["x"] -= 1
    return item


@pytest.mark.parametrize("isolate", [False, True], ids=["here", "isolated"])
@pytest.mark.parametrize("made", ["tensors", "arrays", "a list", "fresh"])
@pytest.mark.parametrize("source", [ops.FromSequence, ops.FromIterable])
def test_a_function_that_works_in_place_on_data_in_memory_is_told_of_once(source, made, isolate, recwarn):
    class Rows(Numbers):
        def __getitem__(self, index):
            row = self.items[index]
            return {"x": row.clone() if made == "fresh" else row}

    rows = [torch.ones(3) * number for number in range(6)]
    if source is ops.FromIterable or made == "a list":
        data = [{"x": row.clone() if made == "fresh" else row} for row in rows]
        made = "a list"
    else:
        data = Rows(torch.stack(rows).numpy() if made == "arrays" else torch.stack(rows))
    graph = pg.Graph()
    graph.add(source(data), name="rows").then(in_place, workers=2)
    with graph.loader(epochs=2, isolate=isolate) as loader:
        for _ in range(2):
            assert len(list(loader)) == 6
    told = [str(each.message) for each in recwarn if issubclass(each.category, PipegraphWarning)]
    assert len(told) == (made != "fresh")
    assert all("stage 'rows': a stage behind it has changed its data in place" in each for each in told)


class Item:
    def __init__(self, x):
        self.x = x
        self.seen = None
        self._cache = {}


class Slotted:
    __slots__ = ("_cache", "seen", "x")

    def __init__(self, x):
        self.x = x
        self.seen = None
        self._cache = {}


def object_in_place(item):
    item.x += 1
    return item.x


def object_filled_in(item):
    item.seen = item.x
    return item.x


def object_caches(item):
    item._cache["square"] = item.x**2
    return item._cache["square"]


@pytest.mark.parametrize("isolate", [False, True], ids=["here", "isolated"])
@pytest.mark.parametrize("kind", [Item, Slotted])
@pytest.mark.parametrize(
    ("held", "function", "said"),
    [
        (True, object_in_place, 1),
        (False, object_in_place, 0),
        (True, object_filled_in, 0),
        (True, object_caches, 0),
    ],
)
def test_a_function_that_changes_objects_of_the_dataset_is_reported_once(
    kind, held, function, said, isolate, recwarn
):
    class Rows(Numbers):
        def __getitem__(self, index):
            return self.items[index] if held else kind(self.items[index])

    data = Rows([kind(number) if held else number for number in range(6)])
    graph = pg.Graph()
    graph.add(ops.FromSequence(data), name="rows", backend="inline").then(function, backend="inline")
    with graph.loader(isolate=isolate) as loader:
        for _ in range(2):
            assert len(list(loader)) == 6
    texts = [str(each.message) for each in recwarn if issubclass(each.category, PipegraphWarning)]
    assert len(texts) == said
    assert all("stage 'rows': a stage behind it has changed its data in place" in each for each in texts)


class Stored:
    """Keeps all in one private attribute, as batches of graphs do."""

    def __init__(self, x):
        self._store = {"x": x}

    @property
    def x(self):
        return self._store["x"]

    @x.setter
    def x(self, value):
        self._store["x"] = value


def test_a_function_that_changes_objects_with_private_attributes_alone_is_reported():
    graph = pg.Graph()
    graph.add(ops.FromSequence([Stored(0), Stored(1)]), name="rows", backend="inline").then(
        object_in_place, backend="inline"
    )
    with (
        graph.loader() as loader,
        pytest.warns(PipegraphWarning, match="'rows': .* changed its data in place"),
    ):
        assert list(loader) == [1, 2]


def test_masked_arrays_of_the_dataset_are_looked_at_like_others(recwarn):
    data = [{"x": np.ma.array([1, 2], mask=[False, True])} for _ in range(4)]
    graph = pg.Graph()
    graph.add(ops.FromSequence(data), name="rows").then(ops.Batch(2))
    with graph.loader() as loader:
        batches = list(loader)
    assert [[row.mask.tolist() for row in batch["x"]] for batch in batches] == [[[False, True]] * 2] * 2
    assert not [each for each in recwarn if issubclass(each.category, PipegraphWarning)]


def test_the_loop_may_change_data_between_passes_and_nothing_is_said(recwarn):
    data = Numbers(torch.arange(4.0).reshape(4, 1))
    graph = pg.Graph()
    graph.add(ops.FromSequence(data), workers=2)
    with graph.loader(epochs=2) as loader:
        assert [float(row) for row in loader] == [0, 1, 2, 3]
        data.items += 1
        assert [float(row) for row in loader] == [1, 2, 3, 4]
    assert not recwarn.list


def test_labels_that_change_where_processes_hold_a_copy_are_told_of_with_the_way_that_sees_them():
    data = Numbers([0, 1, 2])
    graph = pg.Graph()
    graph.add(ops.FromSequence(data), backend="process")
    with graph.loader(epochs=3) as loader:
        assert list(loader) == [0, 1, 2]
        data.items[0] = 9
        with pytest.warns(PipegraphWarning, match="its data has changed .* backend='thread' reads what the"):
            assert list(loader) == [0, 1, 2]
        data.items[0] = 10
        assert list(loader) == [0, 1, 2]


def test_a_sampler_in_the_isolated_process_that_the_loop_changes_is_told_of():
    sampler = Weights()
    graph = pg.Graph()
    graph.add(ops.FromSequence(range(100), sampler=sampler))
    with graph.loader(epochs=3, isolate=True) as loader:
        assert list(loader) == [0] * 6
        sampler.number = 4
        with pytest.warns(
            PipegraphWarning, match=r"or its sampler, has changed .* without isolate=True reads"
        ):
            assert list(loader) == [0] * 6


def test_an_index_beyond_what_processes_have_of_a_growing_buffer_is_explained():
    class Growing(Weights):
        """Draws from what the buffer holds when it is asked."""

        def __iter__(self):
            buffer.items.append(3)
            return iter([len(buffer.items) - 1])

    buffer = Numbers([0, 1, 2])
    graph = pg.Graph()
    graph.add(ops.FromSequence(buffer, sampler=Growing()), backend="process")
    with graph.loader() as loader, pytest.raises(IndexError) as failed:
        list(loader)
    assert "the length of its data (3, now 4) has changed" in "".join(failed.value.__notes__)


@pytest.mark.parametrize("way", ["inline", "threads"])
def test_what_is_added_in_the_middle_of_an_epoch_belongs_to_the_next_and_no_sample_comes_twice(way):
    data = Numbers(list(range(40)))
    graph = pg.Graph()
    graph.add(ops.FromSequence(data, shuffle=True), capacity=1, **WAYS[way])
    with graph.loader() as loader:
        for epoch in range(3):
            size, found = len(data), []
            for item in loader:
                found.append(item)
                data.items.append(1_000 * epoch + len(data))
            assert sorted(found) == sorted(data.items[:size])


class Level:
    """A transform whose strength the loop chooses."""

    def __init__(self):
        self.level = 0

    def __call__(self, item):
        return item + self.level

    def other(self, item):
        return item + self.level


GLOBAL = {"level": 0}


def by_global(item):
    return item + GLOBAL["level"]


def through_another(item):
    return by_global(item)


class Reading:
    def __call__(self, item):
        return by_global(item)


class Inheriting(Reading):
    pass


class Split:
    def __call__(self, item):
        return self.raised(item + self.level)

    @property
    def level(self):
        return GLOBAL["level"]

    @staticmethod
    def raised(item):
        return item + SECOND["level"]


SECOND = {"level": 0}


def functions():
    made = Level()
    closed = {"level": 0}
    return {
        "object": (made, vars(made)),
        "method": (made.other, vars(made)),
        "closure": (lambda item: item + closed["level"], closed),
        "global": (through_another, GLOBAL),
        "inherited": (Inheriting(), GLOBAL),
        "property": (Split(), GLOBAL),
        "static": (Split(), SECOND),
        "filter": (ops.Filter(lambda item: item >= closed["level"]), closed),
        "collate": (ops.Batch(1, collate=lambda items: items[0] + closed["level"]), closed),
    }


@pytest.mark.parametrize("way", ["inline", "threads"])
@pytest.mark.parametrize("kind", sorted(functions()))
def test_a_function_works_with_what_the_loop_has_set_when_its_pass_begins(kind, way):
    function, read = functions()[kind]
    options = {"backend": "inline"} if way == "inline" or kind == "collate" else WAYS[way]
    graph = pg.Graph()
    graph.add(ops.FromSequence(range(6))).then(function, **options)
    found = passes(graph, lambda epoch: read.update(level=epoch))
    GLOBAL["level"] = SECOND["level"] = 0
    if kind == "filter":
        assert found == [list(range(epoch, 6)) for epoch in range(EPOCHS)]
    else:
        assert found == [[item + epoch for item in range(6)] for epoch in range(EPOCHS)]


@pytest.mark.parametrize("isolate", [False, True], ids=["processes", "isolated"])
def test_a_function_in_another_process_that_the_loop_changes_is_told_of(isolate):
    made = Level()
    graph = pg.Graph()
    node = graph.add(ops.FromSequence(range(3)))
    node.then(made, name="level", **({} if isolate else {"backend": "process"}))
    with graph.loader(epochs=2, isolate=isolate) as loader:
        assert list(loader) == [0, 1, 2]
        made.level = 5
        with pytest.warns(PipegraphWarning, match="stage 'level': what its function reads has changed since"):
            assert list(loader) == [0, 1, 2]


class Scaled(Numbers):
    """Reads something that is not in it."""

    def __getitem__(self, index):
        return self.items[index] * (GLOBAL["level"] + 1)


@pytest.mark.parametrize("kind", ["one of a list", "one of an array", "global"])
def test_a_single_value_of_large_data_is_seen(kind):
    items = np.arange(5_000) if kind == "one of an array" else list(range(5_000))
    graph = pg.Graph()
    graph.add(ops.FromSequence(Scaled(items)), workers=2)
    wanted = []

    def change(epoch):
        if kind == "global":
            GLOBAL["level"] = epoch
        else:
            items[3] = -epoch
        wanted.append([int(item) * (GLOBAL["level"] + 1) for item in items])

    found = passes(graph, change)
    GLOBAL["level"] = 0
    assert found == wanted


class Slotted:
    """Data and a function whose attributes lie in slots, one of them a private one."""

    __slots__ = ("__level", "level", "unset")

    def __init__(self):
        self.level = self.__level = 0

    def set(self, level):
        self.level, self.__level = level, 10 * level

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index + self.level + self.__level

    def __call__(self, item):
        return self[item]


@pytest.mark.parametrize("kind", ["data", "function"])
def test_attributes_in_slots_are_seen(kind):
    graph, made = pg.Graph(), Slotted()
    if kind == "data":
        graph.add(ops.FromSequence(made), workers=2)
    else:
        graph.add(ops.FromSequence(range(4))).then(made)
    assert passes(graph, made.set) == [[index + 11 * epoch for index in range(4)] for epoch in range(EPOCHS)]


def test_using_a_path_does_not_change_the_data():
    """A path keeps its text and hash, once computed, in slots."""
    folder, other = Path("images"), Path("masks")
    before = fingerprint([folder])
    assert {str(folder): hash(folder)}
    assert fingerprint([folder]) == before != fingerprint([other])


def first_version(item):
    return item


def second_version(item):
    return item + 100


def test_code_that_is_exchanged_in_a_function_holds_from_the_next_pass_on():
    def function(item):
        return item

    def exchange(epoch):
        function.__code__ = (second_version if epoch else first_version).__code__

    graph = pg.Graph()
    graph.add(ops.FromSequence(range(6))).then(function)
    assert passes(graph, exchange) == [list(range(6)), *[list(range(100, 106))] * 3]


def test_texts_are_seen_beyond_their_beginning():
    prompt = "Describe the picture. " * 50
    assert fingerprint({"prompt": [prompt + "short"]}) != fingerprint({"prompt": [prompt + "plain"]})
    assert fingerprint(prompt.encode() + b"a") != fingerprint(prompt.encode() + b"b")
