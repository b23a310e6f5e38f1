"""semantics.md, "Passes, epochs, states", line by line."""

import json
import re
import threading

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import LoaderClosedError, PipegraphWarning, StateError

pytestmark = pytest.mark.usefixtures("no_leaks")


def items(epoch):
    """Ten numbers that carry their epoch."""
    return range(100 * epoch, 100 * epoch + 10)


def epoch_graph(source=items, ahead=False, **options):
    graph = pg.Graph("epochs")
    items = ops.FromIterable(source)
    items.reads_ahead = ahead
    graph.add(items, name="source", **options).then(lambda x: x, name="same")
    return graph


def through_json(loader):
    return json.loads(json.dumps(loader.state_dict()))


# -- passes ----------------------------------------------------------------------------------------


def test_each_for_is_the_next_epoch():
    with epoch_graph().loader(epochs=3) as loader:
        for epoch in range(3):
            assert loader.epoch == epoch
            assert list(loader) == list(items(epoch))
        assert loader.epoch == 3


def test_the_loop_over_loader_epoch_is_right_after_any_load():
    for stop in (0, 1, 9, 10, 13):
        got = []
        with epoch_graph().loader(epochs=3) as loader:
            state = through_json(loader)
            for _ in range(loader.epoch, 3):
                for item in loader:
                    if len(got) == stop:
                        break
                    got.append(item)
                    state = through_json(loader)
                if len(got) == stop:
                    break
        with epoch_graph().loader(epochs=3) as loader:
            loader.load_state_dict(state)
            for _ in range(loader.epoch, 3):
                got += list(loader)
        assert got == [*items(0), *items(1), *items(2)]


def test_loader_epoch_is_the_running_pass_and_between_passes_the_next():
    with epoch_graph().loader(epochs=2) as loader:
        seen = []
        for _ in loader:
            seen.append(loader.epoch)
        assert set(seen) == {0}
        assert loader.epoch == 1


def test_after_a_break_the_loader_continues_with_the_next_epoch_as_dataloader_does():
    with epoch_graph().loader(epochs=2) as loader:
        for _ in loader:
            break
        assert loader.epoch == 1
        assert list(loader) == list(items(1))


def test_a_pass_beyond_the_last_epoch_still_works():
    with epoch_graph().loader(epochs=1) as loader:
        assert list(loader) == list(items(0))
        assert list(loader) == list(items(1))
        loader.set_epoch(7)
        assert list(loader) == list(items(7))


def test_a_new_iter_ends_the_old_pass_whose_iterator_then_says_so():
    with epoch_graph().loader(epochs=2) as loader:
        first = iter(loader)
        next(first)
        second = iter(loader)
        with pytest.raises(
            LoaderClosedError, match=r"this pass \(epoch 0\) is over: a new pass over the loader has begun"
        ):
            next(first)
        assert next(second) == 100


def test_chunks_yields_data_with_identity():
    with epoch_graph().loader() as loader:
        chunk = next(loader.chunks())
    assert (chunk.data, chunk.keys, chunk.positions.tolist(), chunk.sources, chunk.epoch) == (
        0,
        (0,),
        [0],
        ("source",),
        0,
    )
    assert len(chunk) == 1


def test_nothing_starts_before_the_first_iter():
    before = set(threading.enumerate())
    loader = epoch_graph().loader()
    loader.state_dict()
    assert set(threading.enumerate()) <= before
    iter(loader)
    assert set(threading.enumerate()) - before
    loader.close()


# -- states ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", range(11))
def test_a_state_inside_the_loop_holds_the_rest_of_that_epoch(taken):
    with epoch_graph().loader(epochs=2) as loader:
        numbers = iter(loader)
        got = [next(numbers) for _ in range(taken)]
        state = through_json(loader)
    with epoch_graph().loader(epochs=2) as loader:
        loader.load_state_dict(state)
        assert loader.epoch == 0
        assert got + list(loader) == list(items(0))
        assert loader.epoch == 1
        assert list(loader) == list(items(1))


def test_the_state_after_the_last_chunk_gives_an_empty_pass_and_then_the_next_epoch():
    with epoch_graph().loader(epochs=2) as loader:
        for _ in loader:
            state = through_json(loader)
    with epoch_graph().loader(epochs=2) as loader:
        loader.load_state_dict(state)
        assert list(loader) == []
        assert list(loader) == list(items(1))


def test_the_state_after_the_loop_or_before_the_first_pass_holds_a_whole_epoch():
    with epoch_graph().loader(epochs=2) as loader:
        start = through_json(loader)
        list(loader)
        end = through_json(loader)
    for state, epoch in ((start, 0), (end, 1)):
        with epoch_graph().loader(epochs=2) as loader:
            loader.load_state_dict(state)
            assert list(loader) == list(items(epoch))


def test_the_state_after_a_break_holds_the_rest_of_the_broken_pass():
    with epoch_graph().loader(epochs=2) as loader:
        for item in loader:
            if item == 3:
                break
        state = through_json(loader)
        assert loader.epoch == 1
    with epoch_graph().loader(epochs=2) as loader:
        loader.load_state_dict(state)
        assert list(loader) == [4, 5, 6, 7, 8, 9]


def test_a_state_loaded_and_saved_at_once_is_the_same_state():
    with epoch_graph().loader() as loader:
        numbers = iter(loader)
        next(numbers)
        state = through_json(loader)
        loader.load_state_dict(state)
        assert through_json(loader) == state
        with pytest.raises(LoaderClosedError, match="a state was loaded"):
            next(numbers)
        assert next(iter(loader)) == 1


def test_the_keys_of_a_state_are_fixed():
    def shape(value):
        return {key: shape(each) for key, each in value.items()} if isinstance(value, dict) else None

    with epoch_graph().loader(rank=1, world_size=2, equal_steps=False) as loader:
        first = loader.state_dict()
        assert "rank0" in first and "rank1" not in first  # any rank's part is enough in an elastic graph
        shapes = [shape(first)]
        for _ in loader:
            shapes.append(shape(loader.state_dict()))
        shapes.append(shape(loader.state_dict()))
    assert all(each == shapes[0] for each in shapes)


def test_a_state_of_another_graph_is_refused_naming_the_stages_that_differ():
    with epoch_graph().loader() as loader:
        state = loader.state_dict()
    other = pg.Graph("other")
    other.add(ops.FromIterable(items), name="source").then(ops.Filter(bool), name="same").then(
        str, name="more"
    )
    with other.loader() as loader:
        with pytest.raises(
            StateError,
            match=re.escape(
                "the state is of another graph than 'other': stage 'same' had the function tests.loader.test_loader_passes.epoch_graph.<locals>.<lambda>, now builtins.bool; stage 'more' is not in the state; it delivered from same:0, this graph from more:0"
            ),
        ):
            loader.load_state_dict(state)
        with pytest.raises(StateError, match="not the state of a loader"):
            loader.load_state_dict({"epoch": 1})
    seeded = epoch_graph()
    seeded.seed = 5
    with (
        seeded.loader() as loader,
        pytest.raises(StateError, match="saved with seed=0, graph 'epochs' has seed=5"),
    ):
        loader.load_state_dict(state)


def test_workers_backends_capacities_and_policies_may_change_between_save_and_load():
    def make(**options):
        graph = pg.Graph("g")
        graph.add(ops.FromSequence(range(20)), **options).then(lambda x: x + 1, name="add", **options)
        return graph

    with make().loader() as loader:
        for _ in zip(range(7), loader, strict=False):
            state = through_json(loader)
    for options in ({"workers": 3}, {"backend": "inline"}, {"capacity": 1}, {"on_error": pg.Skip(2)}):
        with make(**options).loader() as loader:
            loader.load_state_dict(state)
            assert list(loader) == list(range(8, 21))


# -- set_epoch and prefetching ----------------------------------------------------------------------


def test_set_epoch_to_the_same_epoch_keeps_a_restored_position():
    with epoch_graph().loader(epochs=2) as loader:
        numbers = iter(loader)
        for _ in range(4):
            next(numbers)
        state = through_json(loader)
    with epoch_graph().loader(epochs=2) as loader:
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert list(loader) == [4, 5, 6, 7, 8, 9]
        loader.load_state_dict(state)
        with pytest.warns(PipegraphWarning, match=r"set_epoch\(1\) discards what was restored of epoch 0"):
            loader.set_epoch(1)
        assert list(loader) == list(items(1))
        loader.set_epoch(0)
        assert list(loader) == list(items(0))


def test_set_epoch_during_a_pass_holds_for_the_next_one():
    with epoch_graph().loader(epochs=None) as loader:
        got = []
        for item in loader:
            loader.set_epoch(5)
            got.append(item)
        assert got == list(items(0))
        assert loader.epoch == 5
        assert list(loader) == list(items(5))
        assert list(loader) == list(items(6))


class Opened:
    """A source callable that records which epochs were begun."""

    def __init__(self):
        self.begun = []
        self.condition = threading.Condition()

    def __call__(self, epoch):
        with self.condition:
            self.begun.append(epoch)
            self.condition.notify_all()
        return items(epoch)

    def wait_for(self, epoch):
        with self.condition:
            assert self.condition.wait_for(lambda: epoch in self.begun, 20)


def test_with_epochs_n_prefetching_crosses_boundaries_and_never_touches_epoch_n():
    opened = Opened()
    with epoch_graph(opened, ahead=True).loader(epochs=3) as loader:
        assert next(iter(loader)) == 0
        opened.wait_for(2)  # queues hold more than three epochs
        for epoch in (1, 2):
            assert list(loader)[-1] == items(epoch)[-1]
        assert opened.begun.count(3) == 0


def test_by_default_nothing_of_the_next_epoch_is_read_before_its_pass():
    opened = Opened()
    with epoch_graph(opened).loader() as loader:
        list(loader)
        assert opened.begun == [0]
        list(loader)
        assert opened.begun == [0, 1]


def test_consecutive_passes_keep_their_workers_and_their_prefetched_work():
    opened, names = Opened(), []
    with epoch_graph(opened).loader(epochs=3) as loader:
        for _ in range(3):
            list(loader)
            names.append(sorted(t.ident for t in threading.enumerate() if t.name.startswith("pipegraph-")))
        assert names[0] == names[1] == names[2]
    assert opened.begun == [0, 1, 2]  # each was read once


def test_an_empty_source_is_an_empty_epoch():
    for source in (ops.FromIterable([]), ops.FromSequence([])):
        graph = pg.Graph("empty")
        graph.add(source).then(ops.Batch(2))
        with graph.loader(epochs=2) as loader:
            assert list(loader) == []
            assert list(loader) == []
            assert loader.epoch == 2


# -- len -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "length"),
    [
        (lambda s: s, 10),
        (lambda s: s.then(ops.Batch(4, drop_last=True)), 2),
        (lambda s: s.then(ops.Bucket(len, [1])), 10),
        (lambda s: s.graph.add(ops.Zip(), s, s), 10),
        (lambda s: s.graph.add(ops.Mix([1, 1], stop="all"), s, s), 20),
    ],
)
def test_len_is_the_chunks_per_epoch_of_this_rank(make, length):
    graph = pg.Graph("g")
    make(graph.add(ops.FromSequence([[i] for i in range(10)])))
    with graph.loader() as loader:
        assert len(loader) == length == len(list(loader))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda s: s.then(ops.Filter(bool), name="f"), "'f'"),
        (lambda s: s.then(ops.FlatMap(list), name="f"), "'f'"),
        (lambda s: s.then(len, name="f", on_error=pg.Skip()), "'f'"),
        (lambda s: s.graph.add(ops.FromIterable(lambda: []), name="f"), "'f'"),
        (lambda s: s.then(ops.Batch(cost=len, limit=9), name="f"), "'f'"),
    ],
)
def test_len_of_what_the_data_decides_is_a_type_error_that_names_the_stages(make, names):
    graph = pg.Graph("g")
    node = make(graph.add(ops.FromSequence([[i] for i in range(10)])))
    loader = graph.loader(node)
    with pytest.raises(TypeError, match=f"this loader has no length: it depends on the data in {names}"):
        len(loader)


# -- closing ---------------------------------------------------------------------------------------


def test_close_twice_and_use_after_close():
    loader = epoch_graph().loader()
    numbers = iter(loader)
    next(numbers)
    state = loader.state_dict()
    loader.close()
    loader.close()
    with pytest.raises(LoaderClosedError, match=r"this pass \(epoch 0\) is over: the loader was closed"):
        next(numbers)
    with pytest.raises(LoaderClosedError, match="this loader is closed; make another"):
        iter(loader)
    with pytest.raises(LoaderClosedError, match="this loader is closed"):
        loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert "closed" in repr(loader)


# -- passes that deliver nothing --------------------------------------------------------------------


@pytest.mark.parametrize(
    "between", [[], [ops.Shuffle(6)], [ops.FlatMap(lambda x: [x])]], ids=["plain", "window", "none"]
)
def test_the_length_after_a_load_is_what_is_left_of_the_epoch(between):
    def make(size=3):
        graph = pg.Graph("left")
        node = graph.add(ops.FromSequence(range(20)), name="rows")
        for operator in between:
            node = node.then(operator)
        node.then(ops.Batch(size), name="batches")
        return graph.loader(epochs=3)

    with make() as loader:
        passing = iter(loader)
        next(passing), next(passing)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = len(list(passing))
    with make() as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state | {"rank0": loader.state_dict()["rank0"]}
        if between and isinstance(between[0], ops.FlatMap):
            with pytest.raises(TypeError, match="no length"):
                len(loader)
            return
        assert len(loader) == rest == 5
        passing = iter(loader)
        next(passing)
        assert len(loader) == 5  # of the pass, also inside it
        again = json.loads(json.dumps(loader.state_dict()))
        list(passing)
        assert len(loader) == 7
        next(iter(loader))
        assert len(loader) == 7
        loader.load_state_dict(again)
        assert len(loader) == len(list(loader)) == 4
    with make(size=4) as loader:
        with pytest.warns(PipegraphWarning, match="a graph that was changed since"):
            loader.load_state_dict(state, allow=["batches"])
        with pytest.raises(
            TypeError, match="no length in this epoch: it continues in a graph that was changed"
        ):
            len(loader)
