"""The picture of a plan: complete, well-formed, whatever stages are called."""

from xml.etree import ElementTree

import pipegraph as pg
from pipegraph import operators as ops

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_every_stage_is_drawn_with_its_workers_and_its_queue():
    graph = pg.Graph("drawn")
    numbers = graph.add(ops.FromSequence(range(8)), name="numbers")
    doubled = numbers.then(lambda x: 2 * x, name="double", workers=3, backend="process", capacity=5)
    doubled.then(lambda x: x, name="same", backend="inline").then(ops.Batch(2), name="batch")
    found = texts(graph.to_svg())
    for said in (
        "numbers",
        "1 worker",
        "1024 samples",
        "double",
        "3 processes",
        "5 samples",
        "inline",
        "training",
    ):
        assert said in found
    assert found.count("2 batches") == 1
