"""A graph whose one stage works in processes, and what it delivers."""

import pipegraph as pg
from pipegraph import operators as ops


def pipeline(fn, items=range(20), workers=2, **options):
    graph = pg.Graph("g", seed=3)
    source = graph.add(ops.FromSequence(items))
    graph.tail = graph.add(ops.Map(fn), source, name="work", workers=workers, backend="process", **options)
    return graph


def delivered(graph, **options):
    with graph.loader(**options) as loader:
        return list(loader)


def hosts(loader):
    return [worker.operator._host for worker in loader._runtime.workers["work"]]
