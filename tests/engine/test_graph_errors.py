"""What is wrong with a description is said at ``add`` or ``plan()``: the rule, the value, the remedy."""

import re

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError


def identity(x):
    return x


@pytest.fixture
def graph():
    return pg.Graph("g")


@pytest.fixture
def numbers(graph):
    return graph.add(ops.FromIterable(range(10)), name="numbers")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "stage 'map': workers must be >= 1 or 'auto', got 0"),
        ({"capacity": 0}, "stage 'map': capacity must be >= 1 item or 'auto', got 0"),
        ({"on_error": "ignore"}, "stage 'map': on_error must be \"raise\", pg.Skip(budget)"),
        ({"timeout": 1}, "stage 'map': timeout= needs backend=\"process\": nothing can end a thread"),
        ({"name": "numbers"}, "the graph already has a stage of this name; choose another name="),
    ],
)
def test_a_wrong_option_is_an_error_at_add(graph, numbers, options, message):
    with pytest.raises(GraphError, match=re.escape(message)):
        numbers.then(lambda x: x, **options)


def test_wrong_arity_names_the_way_to_join(graph, numbers):
    with pytest.raises(
        GraphError, match=r"identity takes exactly one upstream node, got 2; join several with Zip\(\)"
    ):
        graph.add(identity, numbers, numbers)
    with pytest.raises(GraphError, match="got 0; a pipeline begins with a source such as ops.FromSequence"):
        graph.add(identity)
    with pytest.raises(GraphError, match="a source takes no upstream node, got 1"):
        graph.add(ops.FromIterable([]), numbers)
    with pytest.raises(GraphError, match="zip takes at least one upstream node"):
        graph.add(ops.Zip())


def test_nodes_of_other_graphs_and_other_things_are_refused(graph, numbers):
    with pytest.raises(GraphError, match="upstream node 'numbers' belongs to graph 'g'"):
        pg.Graph("other").add(identity, numbers)
    with pytest.raises(GraphError, match="upstream must be nodes of this graph, got 3"):
        graph.add(identity, 3)
    with pytest.raises(GraphError, match=r"got the class Batch: pass an instance, Batch\(...\)"):
        numbers.then(ops.Batch)
    with pytest.raises(GraphError, match="expected an operator, a source or a function, got 5$"):
        numbers.then(5)
    with pytest.raises(GraphError, match=r"got range\(0, 9\); to read data, use ops.FromSequence\(data\)"):
        graph.add(range(9))


def test_an_empty_graph_and_several_sinks_say_what_is_needed(graph):
    with pytest.raises(GraphError, match="graph 'g' is empty: add a source first"):
        graph.plan()
    graph.add(ops.FromIterable([1]), name="a")
    graph.add(ops.FromIterable([1]), name="b")
    with pytest.raises(GraphError, match=r"graph 'g' has 2 sinks \(a, b\): name one with output="):
        graph.loader()


def test_incompatible_neighbours_name_what_to_put_between_them(graph, numbers):
    batches = numbers.then(ops.Batch(2), name="batches")
    batches.then(ops.Batch(2), name="again")
    with pytest.raises(
        GraphError,
        match=re.escape(
            "stage 'again': batch takes samples, but 'batches' gives batches; put Unbatch() between them"
        ),
    ):
        graph.plan("again")
    numbers.then(ops.Unbatch(), name="undo")
    with pytest.raises(
        GraphError,
        match=re.escape(
            "stage 'undo': unbatch takes batches, but 'numbers' gives samples; put Batch(n) between them"
        ),
    ):
        graph.plan("undo")


def test_mix_wants_one_weight_per_input(graph, numbers):
    graph.add(ops.Mix([1, 2, 3]), numbers, numbers)
    with pytest.raises(GraphError, match="Mix: 3 weights for 2 inputs; give one weight per input"):
        graph.plan()
    with pytest.raises(
        GraphError,
        match="Mix: weights must be positive numbers, one per input, got",
    ):
        ops.Mix([1, 0])
    with pytest.raises(GraphError, match='Mix: stop must be "first" or "all", got \'repeat\''):
        ops.Mix([1], stop="repeat")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ops.Batch(0), "Batch: size must be an int >= 1, got 0"),
        (lambda: ops.Bucket(3, [1]), "Bucket: length must be a function of a sample, got 3"),
        (
            lambda: pg.Skip("all"),
            "Skip: budget must be a count (an int >= 0), a share (a float of 0 to 1) or None, got 'all'",
        ),
        (
            lambda: pg.Retry(then="skip"),
            "Retry: then must be \"raise\" or pg.Skip(...), got 'skip'",
        ),
    ],
)
def test_wrong_parameters_are_errors_at_once(make, message):
    with pytest.raises(GraphError, match=re.escape(message)):
        make()


def test_policies_that_cannot_work_are_refused_with_the_reason(graph, numbers):
    sequence = graph.add(ops.FromSequence(range(10)), name="sequence")
    cases = [
        (
            sequence.then(ops.Batch(2), on_error=pg.Retry(1)),
            "Retry() tries one item again, but batch holds earlier items",
        ),
        (
            graph.add(ops.Concat(), sequence, numbers, on_error=pg.Skip()),
            "is for work on items that can fail; concat only hands them on",
        ),
        (
            graph.add(ops.FromIterable([1]), on_error=pg.Skip()),
            "needs a random-access source (FromSequence, ListFiles); fromiterable ends with its first error",
        ),
    ]
    for node, message in cases:
        with pytest.raises(GraphError, match=re.escape(message)):
            graph.plan(node)


def test_loader_options_are_checked(graph, numbers):
    for options, message in [
        ({"epochs": 0}, "epochs must be >= 1 or None (endless), got 0"),
        ({"memory_limit": 1.5}, "memory_limit must be whole bytes or a size such as '1.5 GB', got 1.5"),
        ({"memory_limit": "0 B"}, "memory_limit must be at least 1 byte, got '0 B'"),
        ({"rank": 1}, "rank and world_size go together, got rank=1, world_size=None"),
        ({"rank": 2, "world_size": 2}, "rank must be in 0..world_size-1, got rank=2, world_size=2"),
    ]:
        with pytest.raises(GraphError, match=re.escape(message)):
            graph.loader(**options)


def test_graphs_and_plans_print_what_they_hold(graph, numbers):
    route = numbers.then(ops.Route(lambda x: x % 2, 2), name="route")
    graph.add(ops.Merge(), route[0], route[1].then(identity, name="odd", workers=3), name="merge")
    assert str(graph).splitlines() == [
        "graph 'g', seed 0, 5 stages".replace("5", "4"),
        "  numbers  FromIterable",
        "  route    Route  <- numbers",
        "  odd      Map  <- route[1]",
        "  merge    Merge  <- route[0], odd",
    ]
    plan = str(graph.plan())
    assert re.search(r"odd +Map +3 +thread +64 samples +route", plan)
    assert "delivers: merge" in plan
    assert repr(route[1]) == "<Node route[1]>"
