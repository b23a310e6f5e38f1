"""States of graphs that were changed since: the sources continue, everything else begins anew."""

import json
import warnings

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import StateError

COUNT = 60


def numbers(start=0, count=COUNT):
    return ops.FromSequence(range(start, start + count))


def saved(make, steps, **options):
    """What a graph delivers in some steps, and its state."""
    with make().loader(**options) as loader:
        passing = iter(loader)
        return [next(passing) for _ in range(steps)], json.loads(json.dumps(loader.state_dict()))


def rest(make, state, allow, **options):
    """What another graph delivers of the epoch from a state, also after a resume behind each of its first items."""
    with make().loader(**options) as loader:
        with pytest.warns(
            pg.errors.PipegraphWarning, match="its sources continue where they stood, everything else"
        ):
            loader.load_state_dict(state, allow=allow)
        states = [json.loads(json.dumps(loader.state_dict()))]
        found = []
        for item in loader:
            found.append(item)
            states.append(json.loads(json.dumps(loader.state_dict())))
    for number, again in enumerate(states[:8]):
        with make().loader(**options) as loader:  # the state of the new graph needs no permission
            loader.load_state_dict(again)
            assert list(loader) == found[number:]
    return found


def chain(*stages, **named):
    def make():
        graph = pg.Graph("chain", seed=2)
        source = named["source"]() if "source" in named else numbers()
        node = graph.add(source, name="numbers")
        for name, operator in stages:
            node = node.then(operator() if isinstance(operator, type) else operator, name=name)
        return graph

    return make


def flat(items):
    return [x for item in items for x in item]


def same(x):
    return x


def renamed(x):
    return x


def test_a_renamed_function_changes_nothing_that_is_delivered():
    head, state = saved(chain(("map", same)), 7)
    assert head + rest(chain(("map", renamed)), state, "map") == list(range(COUNT))


@pytest.mark.parametrize(
    ("before", "after", "allow"),
    [
        ([], [("map", same)], ["map"]),
        (
            [("map", same), ("batch", ops.Batch(4, collate=list))],
            [("batch", ops.Batch(4, collate=list))],
            ["map"],
        ),
        ([("batch", ops.Batch(4, collate=list))], [("batch", ops.Batch(6, collate=list))], ["batch"]),
    ],
)
def test_stages_that_hold_nothing_may_change_and_nothing_is_lost_or_comes_twice(before, after, allow):
    head, state = saved(chain(*before), 5)
    found = rest(chain(*after), state, allow)
    items = [each if isinstance(each, list) else [each] for each in head + found]
    assert flat(items) == list(range(COUNT))


def test_what_an_open_window_had_given_comes_again_and_nothing_is_lost():
    head, state = saved(chain(("shuffle", ops.Shuffle(16))), 20)
    found = rest(chain(("shuffle", ops.Shuffle(8))), state, ["shuffle"])
    assert sorted(found) == list(range(16, COUNT))
    assert sorted(head[:16]) == list(range(16))


def mixture(**weights):
    def make():
        graph = pg.Graph("mixture", seed=1)
        nodes = [
            graph.add(ops.FromSequence([f"{name}{i}" for i in range(50)]), name=name) for name in weights
        ]
        graph.add(ops.Mix(list(weights.values()), stop="all"), *nodes, name="mix")
        return graph

    return make


def test_each_input_of_a_mix_continues_and_a_new_one_begins_at_its_start():
    head, state = saved(mixture(news=1.0, books=1.0), 40)
    found = rest(mixture(news=0.5, books=2.0, code=1.0), state, ("mix", "code"))
    assert sorted(head + found) == sorted(
        f"{name}{i}" for name in ("news", "books", "code") for i in range(50)
    )
    head, state = saved(mixture(news=1.0, books=1.0), 40)
    found = rest(mixture(books=1.0), state, ("mix", "news"))
    assert [x for x in head if x[0] == "b"] + found == [f"books{i}" for i in range(50)]


def test_a_samplers_order_continues():
    def source():
        generator = torch.Generator().manual_seed(3)
        return ops.FromSequence(
            range(COUNT), sampler=torch.utils.data.RandomSampler(range(COUNT), generator=generator)
        )

    whole, _ = saved(chain(source=source), COUNT)
    head, state = saved(chain(("map", same), source=source), 9)
    assert head + rest(chain(("map", renamed), source=source), state, "map") == whole


def test_every_rank_resumes_at_another_size_with_a_changed_function():
    parts = [saved(chain(("map", same)), 8, rank=rank, world_size=2) for rank in range(2)]
    states = [state for _, state in parts]
    found = [x for head, _ in parts for x in head]
    for rank in range(3):
        found += rest(chain(("map", renamed)), states, ["map"], rank=rank, world_size=3)
    assert sorted(set(found)) == list(range(COUNT))
    assert len(found) <= COUNT + 2


def test_a_state_from_between_two_epochs_begins_the_next_in_any_graph():
    with chain(("batch", ops.Batch(4, collate=list)))().loader(epochs=2) as loader:
        list(loader)
        state = json.loads(json.dumps(loader.state_dict()))
    with chain(("shuffle", ops.Shuffle(4)))().loader(epochs=2) as loader:
        with pytest.warns(pg.errors.PipegraphWarning):
            loader.load_state_dict(state, allow=("batch", "shuffle"))
        assert loader.epoch == 1
        assert sorted(loader) == list(range(COUNT))


@pytest.mark.parametrize(
    ("stages", "allow", "said"),
    [
        (
            [("map", renamed), ("batch", ops.Batch(4))],
            ["batch"],
            r"stage 'map' had the function \S+\.same, now \S+\.renamed",
        ),
        ([("batch", ops.Batch(4))], [], "stage 'map' of the state is not in the graph"),
        (
            [("map", same), ("batch", ops.Batch(4)), ("more", same)],
            ["map"],
            "stage 'more' is not in the state",
        ),
        ([("map", same), ("batch", ops.Batch(3))], ["other"], "neither graph has a stage 'other'"),
    ],
)
def test_what_is_not_named_is_refused_and_named(stages, allow, said):
    _, state = saved(chain(("map", same), ("batch", ops.Batch(4))), 2)
    with chain(*stages)().loader() as loader, pytest.raises(StateError, match=said):
        loader.load_state_dict(state, allow=allow)


def test_the_same_graph_needs_no_permission_and_says_nothing():
    head, state = saved(chain(("map", same)), 7)
    with chain(("map", same))().loader() as loader, warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.load_state_dict(state, allow=["map"])
        assert head + list(loader) == list(range(COUNT))


class Scaled:
    def __init__(self, by):
        self.by = by
        self._calls = 0

    def __call__(self, x):
        self._calls += 1
        return x * self.by

    def scale(self, x):
        return x * self.by


def scaled_by(by):
    return lambda x: x * by


def scaled_by_default(by):
    return lambda x, by=by: x * by


def scaled_within(by):
    inner = scaled_by(by)
    return lambda x: inner(x)


@pytest.mark.parametrize(
    "make",
    [
        *(Scaled, lambda by: Scaled(by).scale, scaled_by, scaled_by_default, scaled_within),
        lambda by: ops.FlatMap(lambda x: [x] * by),
        lambda by: ops.Batch(2, collate=lambda items: items * by),
        lambda by: ops.Bucket(lambda x: x * by, [3], size=2),
    ],
)
def test_functions_of_the_same_name_that_carry_other_values_are_warned_of(make):
    def build(by):
        graph = pg.Graph("g")
        graph.add(ops.FromSequence(range(6))).then(make(by), name="scale")
        return graph

    def load(by, **options):
        with build(by).loader() as loader, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loader.load_state_dict(state, **options)
            list(loader)
        return [str(each.message) for each in said]

    with build(2).loader() as loader:
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
    assert load(2) == []
    (message,) = load(3)
    assert "stage 'scale': its functions have the names" in message
    assert load(3, allow="scale") == []


@pytest.mark.parametrize("steps", [0, 30])
def test_a_changed_graph_that_begins_a_whole_epoch_knows_its_length(steps):
    _, state = saved(chain(("batch", ops.Batch(2))), steps)
    with chain(("batch", ops.Batch(3)))().loader() as loader:
        with pytest.warns(pg.errors.PipegraphWarning):
            loader.load_state_dict(state, allow=["batch"])
        if steps:
            list(loader)  # what was left of the epoch: nothing
        assert len(loader) == 20
        assert len(list(loader)) == 20
