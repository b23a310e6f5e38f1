"""engine/stage/cursors.py: which of two cursors of one edge comes first."""

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine.stage.cursors import earlier, freeze, same
from pipegraph.engine.stage.restore import unique_paths


class Number(int):
    """Counts how often numbers are compared."""

    compared = 0

    def __lt__(self, other):
        Number.compared += 1
        return int(self) < int(other)

    def __gt__(self, other):
        Number.compared += 1
        return int(self) > int(other)


def nested(depth, number):
    cursor = Number(number)
    for _ in range(depth):
        cursor = (cursor, Number(0))
    return cursor


@pytest.mark.parametrize("compares", [earlier, same])
def test_comparing_looks_at_each_part_of_a_cursor_once(compares):
    Number.compared = 0
    compares(nested(200, 7), nested(200, 7))
    assert Number.compared <= 2 * 201


def test_a_cursor_is_before_another_by_its_first_part_that_differs():
    assert earlier((3, 0), (3, 1)) and not earlier((3, 1), (3, 0))
    assert earlier((2, 9), (3, 0)) and not earlier((3, 0), (2, 9))
    assert earlier(((1, 2), 5), ((1, 3), 0))
    assert same((3, 1), (3, 1)) and not earlier((3, 1), (3, 1))


def test_none_is_the_start_and_snapshots_do_not_count():
    assert earlier(None, 0) and not earlier(0, None) and same(None, None)
    assert earlier((None, 4), (0, 0)) and not earlier((0, 0), (None, 4))
    assert same((4, {"state": 1}, 2), (4, {"state": 9}, 2))
    assert earlier((4, None, 2), (4, {"state": 9}, 3))


def test_cursors_of_forty_nested_flat_maps_resume():
    def graph():
        graph = pg.Graph("nested")
        node = graph.add(ops.FromIterable(range(6)), name="source")
        for level in range(40):
            node = node.then(ops.FlatMap(lambda x: (x,)), name=f"level{level}", backend="inline")
        return graph

    with graph().loader() as loader:
        items = iter(loader)
        first = [next(items) for _ in range(3)]
        state = loader.state_dict()
    with graph().loader() as loader:
        loader.load_state_dict(state)
        assert first + list(loader) == list(range(6))


def test_lists_of_json_are_tuples_again():
    assert freeze([1, [2, {"state": [3]}]]) == (1, (2, {"state": [3]}))


def test_the_ways_through_fan_outs_that_meet_again_are_not_all_listed():
    graph = pg.Graph("diamonds")
    node = graph.add(ops.FromIterable(range(2)), name="source")
    for level in range(40):
        node = graph.add(ops.Mix([1, 1], stop="all"), node, node, name=f"mix{level}")
    unique = unique_paths(graph.plan())
    assert unique["mix39", 0] == (0,) and unique["mix39", 1] == (1,)
    assert ("mix38", 0) not in unique
