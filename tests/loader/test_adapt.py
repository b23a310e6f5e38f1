"""States of graphs that were changed since: what is kept, what begins anew, and what is refused."""

import json
import warnings

import pytest

import pipegraph as pg
from pipegraph import operators as ops

COUNT = 60


def numbers(start=0, count=COUNT):
    return ops.FromSequence(range(start, start + count), order=pg.order.StridedOrder(shuffle=False))


def saved(make, steps, **options):
    """What a graph delivers in some steps, and its state."""
    with make().loader(**options) as loader:
        passing = iter(loader)
        return [next(passing) for _ in range(steps)], json.loads(json.dumps(loader.state_dict()))


def rest(make, state, allow, said=".", **options):
    """What another graph delivers of the epoch from a state."""
    with make().loader(**options) as loader:
        with pytest.warns(pg.errors.PipegraphWarning, match=said):
            loader.load_state_dict(state, allow=allow)
        again = json.loads(json.dumps(loader.state_dict()))
        found = list(loader)
    with make().loader(**options) as loader:  # the state of the new graph needs no permission
        loader.load_state_dict(again)
        assert list(loader) == found
    return found


def chain(*stages, **named):
    def make():
        graph = pg.Graph("chain", seed=2)
        node = graph.add(named.get("source") or numbers(), name="numbers")
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
    head, state = saved(chain(("f", same), ("batch", ops.Batch(4, collate=list))), 3)
    found = rest(chain(("f", renamed), ("batch", ops.Batch(4, collate=list))), state, ["f"], "'f' works on")
    assert flat(head + found) == list(range(COUNT))


def test_one_name_may_be_given_as_it_is():
    head, state = saved(chain(("f", same)), 7)
    assert head + rest(chain(("f", renamed)), state, "f") == list(range(COUNT))


@pytest.mark.parametrize(
    ("before", "after", "allow"),
    [
        ([("batch", 4)], [("batch", 7)], ["batch"]),
        ([("batch", 4)], [("f", renamed), ("batch", 4)], ["f"]),
        ([("f", same), ("batch", 4)], [("batch", 4)], ["f"]),
        (
            [("f", same), ("g", same), ("batch", 4)],
            [("g", same), ("f", same), ("batch", 4)],
            ["f", "g", "batch"],
        ),
        ([("batch", 4)], [("batches", 3)], ["batch", "batches"]),
        ([("batch", 4), ("f", same)], [("batch", 4)], ["f"]),
        ([("batch", 4)], [("batch", 4), ("f", same)], ["f"]),
    ],
)
def test_one_to_one_stages_and_batches_may_change_and_nothing_is_lost_or_comes_twice(before, after, allow):
    def made(stages):
        return chain(*((n, ops.Batch(f, collate=list) if isinstance(f, int) else f) for n, f in stages))

    head, state = saved(made(before), 3)
    assert flat(head + rest(made(after), state, allow)) == list(range(COUNT))


def mixed(*weights, inputs=("a", "b"), stop="all", then=None):
    def make():
        graph = pg.Graph("mixed", seed=2)
        sources = {"a": numbers(0), "b": numbers(100), "c": numbers(200)}
        nodes = [graph.add(sources[name], name=name) for name in inputs]
        node = graph.add(ops.Mix(list(weights), stop=stop), *nodes, name="mix")
        if then is not None:
            node.then(then, name="then")
        return graph

    return make


def test_new_weights_of_a_mix_keep_the_place_of_each_of_its_inputs():
    head, state = saved(mixed(1, 1), 30)
    found = rest(mixed(1, 9), state, ["mix"], "'mix' continues with each input where that stood")
    assert sorted(head + found) == [*range(60), *range(100, 160)]
    early = found[:40]
    assert sum(x >= 100 for x in early) > 25  # of the new weights
    assert [x for x in found if x < 100] == sorted(x for x in found if x < 100)


def test_a_data_set_added_by_name_begins_at_its_start_and_the_others_go_on():
    head, state = saved(mixed(1, 1), 30)
    found = rest(mixed(1, 1, 1, inputs=("c", "a", "b")), state, ["mix", "c"], "'c' begins at the start")
    assert sorted(head + found) == [*range(60), *range(100, 160), *range(200, 260)]


def test_a_data_set_removed_by_name_is_gone_and_the_others_go_on():
    head, state = saved(mixed(1, 1, 1, inputs=("a", "b", "c")), 30)
    found = rest(mixed(1, 1, inputs=("c", "a")), state, ["mix", "b"], "'b' is gone")
    assert sorted(x for x in head + found if not 100 <= x < 160) == [*range(60), *range(200, 260)]
    assert not any(100 <= x < 160 for x in found)


def test_a_single_data_set_becomes_one_of_a_mix_and_a_mix_a_single_one():
    def single():
        graph = pg.Graph("single", seed=2)
        graph.add(numbers(0), name="a")
        return graph

    head, state = saved(single, 20)
    found = rest(mixed(1, 1), state, ["mix", "b"])
    assert sorted(head + found) == [*range(60), *range(100, 160)]
    head, state = saved(mixed(1, 1), 30)
    assert sorted(x for x in head + rest(single, state, ["mix", "b"]) if x < 100) == list(range(60))


def test_a_mix_becomes_a_concatenation_under_the_same_name():
    def one_after_the_other():
        graph = pg.Graph("mixed", seed=2)
        graph.add(
            ops.Concat(), graph.add(numbers(0), name="a"), graph.add(numbers(100), name="b"), name="mix"
        )
        return graph

    head, state = saved(mixed(1, 1), 30)
    found = rest(one_after_the_other, state, ["mix"])
    assert sorted(head + found) == [*range(60), *range(100, 160)]
    assert found == sorted(found)


def test_a_changed_window_begins_anew_where_it_began_and_loses_nothing():
    head, state = saved(chain(("shuffle", ops.Shuffle(10))), 23)
    found = rest(chain(("shuffle", ops.Shuffle(15))), state, ["shuffle"], "'shuffle' begins anew")
    assert sorted(found) == list(range(20, 60)) and len(head) == 23


def test_a_stage_above_a_window_may_change_while_the_window_continues():
    head, state = saved(chain(("f", same), ("shuffle", ops.Shuffle(10))), 23)
    found = rest(chain(("f", renamed), ("shuffle", ops.Shuffle(10))), state, ["f"])
    assert head + found == saved(chain(("f", same), ("shuffle", ops.Shuffle(10))), COUNT)[0]


def test_windows_and_buckets_may_be_added_and_removed():
    bucket = ops.Bucket(lambda x: x % 7, [3], size=4)
    head, state = saved(chain(("batch", ops.Batch(5, collate=list))), 4)
    new = chain(("bucket", bucket), ("shuffle", ops.Shuffle(6)), ("batch", ops.Batch(5, collate=list)))
    assert sorted(flat(head + rest(new, state, ["bucket", "shuffle"]))) == list(range(COUNT))
    head, state = saved(new, 4)
    found = flat(rest(chain(("batch", ops.Batch(5, collate=list))), state, ["bucket", "shuffle"]))
    assert set(flat(head) + found) == set(range(COUNT))


def test_a_changed_bucket_loses_nothing():
    def bucketed(size):
        return chain(("bucket", ops.Bucket(lambda x: x % 7, [3], size=size)))

    head, state = saved(bucketed(4), 21)
    assert set(head + rest(bucketed(9), state, ["bucket"])) == set(range(COUNT))


def twice(x):
    return [x, x]


def two_times(x):
    return [x, x]


def test_a_renamed_function_of_several_items_resumes_inside_the_item():
    for steps in (0, 1, 6, 7):
        head, state = saved(chain(("flat", ops.FlatMap(twice))), steps)
        found = rest(chain(("flat", ops.FlatMap(two_times))), state, ["flat"], "'flat' resumes inside")
        assert head + found == flat([x, x] for x in range(COUNT))


class Sum(pg.Operator):
    """A running sum of multiples."""

    def __init__(self, factor):
        self.factor, self.total = factor, 0

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]

    def process(self, chunk):
        self.total += self.factor * chunk.data
        chunk.data = (chunk.data, self.total)
        return chunk


def test_a_changed_operator_with_a_state_is_given_the_state_that_was_saved(monkeypatch):
    monkeypatch.setattr("pipegraph.engine.kinds.stateful.SNAPSHOT_EVERY", 1)
    head, state = saved(chain(("sum", Sum(1))), 10)
    found = rest(chain(("sum", Sum(2))), state, ["sum"], "'sum' is given the state that was saved")
    assert [x for x, _ in head + found] == list(range(COUNT))
    assert found[0] == (10, sum(range(9)) + 2 * 9 + 2 * 10)  # from the newest snapshot on


def test_an_operator_with_a_state_may_be_added_and_removed(monkeypatch):
    monkeypatch.setattr("pipegraph.engine.kinds.stateful.SNAPSHOT_EVERY", 4)
    head, state = saved(chain(("f", same)), 10)
    assert rest(chain(("f", same), ("sum", Sum(1))), state, ["sum"], "'sum' begins with")[0] == (10, 10)
    head, state = saved(chain(("f", same), ("sum", Sum(1))), 10)
    found = rest(chain(("f", same)), state, ["sum"], "'sum' is gone .of an open window")
    assert found[-1] == 59 and found[0] <= 10 and {x for x, _ in head} | set(found) == set(range(COUNT))


def test_a_changed_source_resumes_at_its_step_and_one_that_keeps_its_own_place_reads_again():
    head, state = saved(chain(("f", same)), 10)
    found = rest(
        chain(("f", same), source=numbers(0, 80)), state, ["numbers"], "'numbers' resumes at the step"
    )
    assert head + found == list(range(80))


def test_branches_of_a_fan_out_keep_their_places():
    def make(function):
        def made():
            graph = pg.Graph("branches")
            source = graph.add(numbers(), name="numbers")
            slow = source.then(ops.Batch(6, collate=list), name="batch").then(ops.Unbatch(), name="unbatch")
            graph.add(ops.Zip(), source.then(function, name="f"), slow, name="zip")
            return graph

        return made

    for steps in (1, 5, 6, 9):
        head, state = saved(make(same), steps)
        assert head + rest(make(renamed), state, ["f"]) == [(x, x) for x in range(COUNT)]


def test_a_route_whose_branch_was_changed_keeps_the_order():
    def make(*names):
        def made():
            graph = pg.Graph("routes")
            routed = graph.add(numbers(), name="numbers").then(
                ops.Route(lambda x: x // 3 % 2, 2), name="route"
            )
            left, right = routed[0], routed[1]
            for name in names:
                left = left.then(same, name=name)
            right = right.then(ops.Batch(3, collate=list), name="batch").then(ops.Unbatch(), name="unbatch")
            graph.add(ops.Merge(), left, right, name="merge")
            return graph

        return made

    for steps in (0, 2, 8, 20):
        head, state = saved(make("f"), steps)
        assert head + rest(make("f", "g"), state, ["g"]) == list(range(COUNT))
        assert head + rest(make(), state, ["f"]) == list(range(COUNT))


@pytest.mark.parametrize("ordered", [True, False])
def test_a_window_that_only_marks_have_passed_restarts_where_its_two_readers_stand(ordered):
    def make(*names):
        def made():
            graph = pg.Graph("windows", seed=0)
            source = graph.add(numbers(0, 14), name="numbers")
            for name in names:
                source = source.then(same, name=name)
            routed = source.then(ops.Route(lambda x: (0, 2, 2, 1, 0)[x % 5], 3), name="route")
            window = routed[0].then(ops.Shuffle(4), name="window")
            short = routed[1].then(same, name="f").then(ops.Shuffle(1), name="short")
            merged = graph.add(ops.Merge(), window, short, routed[2], name="merge")
            graph.add(ops.Concat(), merged, window, name="both").then(same, name="end", ordered=ordered)
            return graph

        return made

    with make()().loader() as loader:
        expected = list(loader)
    for steps in (0, 1, 2, 5, 9, 15):
        for before, after in ((["extra"], []), ([], ["extra"])):
            head, state = saved(make(*before), steps)
            found = head + rest(make(*after), state, ["extra"])
            assert found == expected if ordered else sorted(found) == sorted(expected)


def test_the_first_window_continues_behind_a_bucket_whose_first_group_is_open():
    def make(*names):
        stages = [(name, same) for name in names]
        return chain(
            *stages, ("bucket", ops.Bucket(lambda x: x % 5, [1, 3], size=1)), ("window", ops.Shuffle(2))
        )

    with make()().loader() as loader:
        expected = list(loader)
    for steps in (1, 2, 3, 7):
        head, state = saved(make("extra"), steps)
        assert head + rest(make(), state, ["extra"]) == expected


def test_every_rank_of_an_elastic_graph_resumes_at_another_size_with_a_changed_function():
    def make(function):
        return chain(("f", function), ("batch", ops.Batch(2, collate=list)))

    heads, states = zip(*[saved(make(same), 5, rank=r, world_size=2) for r in range(2)], strict=True)
    found = []
    for rank in range(3):
        found += rest(make(renamed), list(states), ["f"], rank=rank, world_size=3)
    assert set(flat(flat(heads)) + flat(found)) == set(range(COUNT))


def test_a_state_from_between_two_epochs_begins_the_next_in_any_graph():
    with chain(("f", same))().loader() as loader:
        list(loader)
        state = loader.state_dict()
    with mixed(1, 1)().loader() as loader:
        names = ["numbers", "f", "mix", "a", "b"]
        with pytest.warns(pg.errors.PipegraphWarning):
            loader.load_state_dict(state, allow=names)
        assert loader.epoch == 1 and len(list(loader)) == 120


def test_a_budget_resumes_where_another_stage_was_changed():
    def fails(x):
        if x % 10 == 3:
            raise ValueError(x)
        return x

    def make(function):
        def made():
            graph = pg.Graph("budget")
            node = graph.add(numbers(), name="numbers").then(fails, name="fails", on_error=pg.Skip(4))
            node.then(function, name="f")
            return graph

        return made

    _, state = saved(make(same), 30)
    with make(renamed)().loader() as loader:
        with pytest.warns(pg.errors.PipegraphWarning):
            loader.load_state_dict(state, allow=["f"])
        with pytest.raises(ValueError, match="43"):
            list(loader)


# -- what is refused ---------------------------------------------------------------------------------


def refused(make, state, allow, match):
    with make().loader() as loader, pytest.raises(pg.errors.StateError, match=match):
        loader.load_state_dict(state, allow=allow)


def test_what_is_not_named_is_refused_and_named():
    _, state = saved(chain(("f", same), ("batch", ops.Batch(4))), 3)
    other = chain(("f", renamed), ("batch", ops.Batch(5)))
    refused(other, state, ["f"], r"stage 'batch' has other parameters.*allow= \(given: 'f'\)")
    refused(other, state, ["batch", "nonsense"], "neither graph has a stage 'nonsense'; they have 'numbers'")
    refused(chain(("batch", ops.Batch(4))), state, ["batch"], "stage 'f' of the state is not in the graph")
    refused(
        chain(("f", same), ("g", same), ("batch", ops.Batch(4))),
        state,
        ["f"],
        "stage 'g' is not in the state",
    )


def test_a_stage_that_reads_from_another_must_be_named():
    def make(swapped):
        graph = pg.Graph("inputs")
        a, b = graph.add(numbers(), name="a"), graph.add(numbers(100), name="b")
        graph.add(ops.Zip(), a.then(same, name="f"), b if not swapped else a, name="zip")
        if swapped:
            graph.add(ops.Zip(), b, graph.add(numbers(), name="x"), name="unused")
        return graph

    with make(False).loader() as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make(True).loader("zip") as loader, pytest.raises(pg.errors.StateError, match="'zip' reads from"):
        loader.load_state_dict(state, allow=["b"])


def test_a_state_without_the_graph_is_refused_where_something_may_differ():
    _, state = saved(chain(("f", same)), 3)
    del state["graph"]
    refused(chain(("f", renamed)), state, ["f"], "does not say how its graph was wired")
    with chain(("f", same))().loader() as loader:  # but is good for the same graph
        loader.load_state_dict(state)
        assert list(loader) == list(range(3, COUNT))


class OwnPlace(pg.Regroup):
    """Passes chunks on under cursors of its own."""

    def process(self, chunk):
        chunk.before, chunk.after = ("own", chunk.before), ("own", chunk.after)
        return [chunk]

    def resume(self, cursor):
        return cursor[1]


class SaysWhere(OwnPlace):
    inputs_in = (1, 2)

    def begin_at(self, cursor):
        return ("own", cursor)


def test_an_operator_that_keeps_its_place_in_its_own_way_must_say_where():
    _, state = saved(chain(("own", OwnPlace), ("batch", ops.Batch(4))), 3)
    refused(chain(("batch", ops.Batch(4))), state, ["own"], "'own' keeps its place in its own way.*inputs_in")
    head, state = saved(chain(("own", SaysWhere), ("batch", ops.Batch(4, collate=list))), 3)
    assert flat(head + rest(chain(("batch", ops.Batch(4, collate=list))), state, ["own"])) == list(
        range(COUNT)
    )
    head, state = saved(chain(("batch", ops.Batch(4, collate=list))), 3)
    new = chain(("own", SaysWhere), ("batch", ops.Batch(4, collate=list)))
    assert flat(head + rest(new, state, ["own"])) == list(range(COUNT))


def test_the_same_graph_needs_no_permission_and_says_nothing():
    head, state = saved(chain(("f", same)), 7)
    with chain(("f", same))().loader() as loader:
        loader.load_state_dict(state, allow=["f"])
        assert head + list(loader) == list(range(COUNT))


def test_what_other_world_sizes_have_consumed_is_kept_by_source():
    def make(function):
        return chain(("f", function), ("batch", ops.Batch(2, collate=list)))

    heads, states = zip(*[saved(make(same), 3, rank=r, world_size=2) for r in range(2)], strict=True)
    with make(same)().loader() as loader:  # one rank continues where two have been ...
        loader.load_state_dict(list(states))
        passing = iter(loader)
        head = [next(passing) for _ in range(4)]
        state = json.loads(json.dumps(loader.state_dict()))
    found = rest(make(renamed), state, ["f"])  # ... and then with another function
    assert sorted(flat(flat(heads)) + flat(head) + flat(found)) == list(range(COUNT))


class Packed(pg.Operator):
    """Another class with a state, under the name of the first."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}

    def process(self, chunk):
        return chunk


def test_a_state_is_not_given_to_an_operator_of_another_class(monkeypatch):
    monkeypatch.setattr("pipegraph.engine.kinds.stateful.SNAPSHOT_EVERY", 1)
    _, state = saved(chain(("sum", Sum(1))), 10)
    found = rest(chain(("sum", Packed)), state, ["sum"], "'sum' begins with its first state")
    assert found[-1] == COUNT - 1


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


def test_an_older_state_does_not_say_what_functions_carry():
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(6))).then(scaled_by(2), name="scale")
    with graph.loader() as loader:
        state = loader.state_dict()
        del state["functions"]
        loader.load_state_dict(state)


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
