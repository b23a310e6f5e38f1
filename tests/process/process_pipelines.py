"""A graph whose one stage works in processes, and what it delivers."""

import os
import threading
import time

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine.process import process_host
from pipegraph.engine.remote.host import Host
from pipegraph.engine.remote.worker import Page


def pipeline(fn, items=range(20), workers=2, **options):
    graph = pg.Graph("g", seed=3)
    source = graph.add(ops.FromSequence(items))
    graph.tail = graph.add(ops.Map(fn), source, name="work", workers=workers, backend="process", **options)
    return graph


def delivered(graph, **options):
    with graph.loader(**options) as loader:
        return list(loader)


def hosts(loader):
    return [worker.operator._host for worker in loader._crew.workers["work"]]


@pytest.fixture
def tell_that_it_hangs(tmp_path, monkeypatch):
    """What a function calls before it hangs. Only its row is overdue: on a busy machine any row may take long."""
    hanging = tmp_path / "hanging"
    hanging.mkdir()
    awaits, look, asking = Host._await, Page.look, threading.local()

    def noted(host, *timeouts):
        asking.pid = host.pid
        awaits(host, *timeouts)

    def looks(page):
        row, since_ns = look(page)
        return row, since_ns if (hanging / str(asking.pid)).exists() else time.monotonic_ns()

    monkeypatch.setattr(process_host, "STACK_S", 60)
    monkeypatch.setattr(Host, "_await", noted)
    monkeypatch.setattr(Page, "look", looks)
    return lambda: (hanging / str(os.getpid())).touch()
