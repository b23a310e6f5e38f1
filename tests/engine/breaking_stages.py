"""Graphs with one stage that fails at given items, run to their end."""

import pipegraph as pg
from pipegraph import operators as ops


class Broken(ValueError):
    """Of the user."""


def breaks(*bad):
    def work(x):
        if x in bad:
            raise Broken(f"no {x}")
        return x

    return work


def make(work, items=20, source=None, **options):
    graph = pg.Graph("g", seed=1)
    source = ops.FromIterable(range(items)) if source is None else source
    graph.add(source, name="source").then(work, name="work", **options)
    return graph


def collect(graph, epochs=1, **options):
    """What is delivered, the error, and the loader (closed)."""
    with graph.loader(epochs=epochs, **options) as loader:
        got, error = [], None
        try:
            for item in loader:
                got.append(item)
        except BaseException as caught:
            error = caught
    return got, error, loader
