"""engine/stage/cursors.py: which of two cursors of one edge comes first."""

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine.stage.cursors import earlier, same


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


def test_a_cursor_is_before_another_by_its_first_part_that_differs():
    assert earlier((3, 0), (3, 1)) and not earlier((3, 1), (3, 0))
    assert earlier((2, 9), (3, 0)) and not earlier((3, 0), (2, 9))
    assert earlier(((1, 2), 5), ((1, 3), 0))
    assert same((3, 1), (3, 1)) and not earlier((3, 1), (3, 1))


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
