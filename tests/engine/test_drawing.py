"""The picture of a plan: complete, well-formed, whatever stages are called."""

from xml.etree import ElementTree

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError
from pipegraph.planning.drawing import layers

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_a_stage_lies_right_behind_the_last_of_those_it_reads_from():
    edges = [("a", "c"), ("b", "c"), ("c", "d"), ("a", "d")]
    assert layers("abcd", edges) == [["a", "b"], ["c"], ["d"]]


def test_every_stage_is_drawn_with_its_workers_and_its_queue():
    graph = pg.Graph("drawn")
    numbers = graph.add(ops.FromSequence(range(8)), name="numbers")
    doubled = numbers.then(lambda x: 2 * x, name="double", workers=3, backend="process", capacity=5)
    doubled.then(lambda x: x, name="same", backend="inline").then(ops.Batch(2), name="batch")
    found = texts(graph.to_svg())
    for said in (
        "numbers",
        "1 worker",
        "64 samples",
        "double",
        "3 processes",
        "5 samples",
        "inline",
        "training",
    ):
        assert said in found
    assert found.count("2 batches") == 1


def test_names_that_look_like_markup_are_only_names():
    graph = pg.Graph('<script>"&')
    graph.add(ops.FromSequence(range(8)), name="a<b&c>").then(str, name="training")
    found = texts(graph.to_svg())
    assert "a<b&c>" in found
    assert found.count("training") == 2  # the stage of that name, and the loop


def test_only_what_an_output_needs_is_drawn():
    graph = pg.Graph("two ends")
    numbers = graph.add(ops.FromSequence(range(8)), name="numbers")
    numbers.then(str, name="left")
    right = numbers.then(float, name="right")
    assert "left" not in texts(graph.to_svg(right))
    with pytest.raises(GraphError, match="sinks"):
        graph.to_svg()


def labels(svg, ending):
    found = [each for each in ElementTree.fromstring(svg).iter(f"{SVG}text") if each.text.endswith(ending)]
    return [(float(each.get("x")), float(each.get("y"))) for each in found]


def test_a_long_pipeline_continues_in_another_row():
    graph = pg.Graph("long")
    node = graph.add(ops.FromSequence(range(8)), name="source")
    for number in range(59):
        node = node.then(lambda x: x, name=f"stage{number}")
    svg = ElementTree.fromstring(graph.to_svg())
    assert float(svg.get("width")) < 2000
    boxes = [
        (float(each.get("x")), float(each.get("y")))
        for each in svg.iter(f"{SVG}rect")
        if each.get("rx") == "7"
    ]
    assert len(set(boxes)) == 61 and len({y for _, y in boxes}) == 8
    assert max(y for _, y in boxes) + 56 < float(svg.get("viewBox").split()[3])


def test_the_queues_of_a_route_have_places_of_their_own():
    graph = pg.Graph("routed")
    routed = graph.add(ops.FromSequence(range(8)), name="source").then(
        ops.Route(lambda x: x % 3, 3), name="route"
    )
    ways = [routed[0].then(str, name="a"), routed[1].then(str, name="b"), routed[2]]
    graph.add(ops.Merge(), *ways, name="merge")
    places = labels(graph.to_svg(), " samples")
    assert len(places) == 7
    for index, (x, y) in enumerate(places):
        assert all(abs(x - other) > 40 or abs(y - height) > 20 for other, height in places[index + 1 :])
