"""Below ``ordered=False`` the readers of one stage may have cursors of different orders of completion."""

from random_graphs.own_operators import InTurn

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine.stage.restore import restarts


def test_a_restart_begins_each_input_at_the_lowest_cursor_that_a_reader_needs():
    graph = pg.Graph("orders")
    node = graph.add(ops.FromSequence(range(9)), name="source").then(lambda x: x, name="map", ordered=False)
    inner = graph.add(InTurn(2), node, node, node, name="inner")
    graph.add(InTurn(2), inner, inner, inner, name="outer")
    one, other = (
        (1, 1, 1, 1, 0),
        (2, 1, None, 2, 0),
    )  # of the inner fan-in: the lower one begins its third input later
    found = restarts(graph.plan(), (one, other, other, 1, 0), {})
    assert found.steps["source"] == 0
    assert restarts(graph.plan(), (one, one, one, 1, 0), {}).steps["source"] == 1
