"""Promise 6: back to nothing after a break, an error, Ctrl-C, garbage collection, the interpreter's exit."""

import gc
import sysconfig
import textwrap
import threading
import tracemalloc
import warnings
import weakref

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.testing.leaks import Resources

pytestmark = pytest.mark.usefixtures("no_leaks")

WITHOUT_GIL = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def make(**options):
    graph = pg.Graph("g")
    node = graph.add(ops.FromSequence(range(1000)), workers=2)
    node = node.then(lambda x: np.full(100, x), name="arrays", workers=2, **options)
    node.then(ops.Batch(4)).then(lambda x: x, name="last", backend="inline")
    return graph


def threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("pipegraph-")]


def test_an_exception_in_the_training_loop():
    with pytest.raises(ZeroDivisionError), make().loader() as loader:
        for _ in loader:
            1 / 0  # noqa: B018
    assert not threads()


def test_dropping_the_last_reference_to_a_loader_ends_its_threads():
    loader = make().loader()
    batches = iter(loader)
    next(batches)
    gone = weakref.ref(loader)
    del loader, batches
    assert gone() is None
    assert not threads()


def test_user_code_that_does_not_return_is_named_with_its_stack_and_abandoned():
    inside = threading.Event()

    class Release(threading.Event):
        def wait(self, timeout=None):
            inside.set()  # from here on the worker's stack has the line that waits
            return super().wait(timeout)

    release = Release()

    def stubborn(x):
        release.wait()
        return x

    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(3))).then(stubborn, name="stubborn")
    loader = graph.loader()
    iter(loader)
    assert inside.wait(20)
    (stuck,) = [t for t in threading.enumerate() if "stubborn" in t.name]
    runtime = loader._crew
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runtime.close(0.01)  # on a loaded machine the source's worker may take longer, too
    (text,) = [str(each.message) for each in caught if "stubborn" in str(each.message)]
    assert text.startswith(
        "stage 'stubborn': a worker did not return within 0.01 s and was abandoned. Code that waits long can be ended "
        "with backend='process', or by the cancel() of your own source or operator. It stands at:"
    )
    assert "release.wait()" in text
    loader.close()
    release.set()
    stuck.join(20)
    assert not stuck.is_alive()


@pytest.mark.parametrize("cycles", [80, pytest.param(970, marks=pytest.mark.slow)])
def test_cycles_leave_threads_descriptors_and_memory_where_they_were(cycles):
    def cycle():
        with make(capacity=2).loader(epochs=2, memory_limit="1 MB") as loader:
            for _ in loader:
                break
            for _ in loader:
                break

    for _ in range(30):
        cycle()
    before = Resources.now()
    tracemalloc.start()
    cycle()
    gc.collect()
    grown = []
    for _ in range(2):  # a table of weak references, shared with other tests, may grow once, in one of them
        start = tracemalloc.get_traced_memory()[0]
        for _ in range(cycles // 2):
            cycle()
        gc.collect()
        grown.append(tracemalloc.get_traced_memory()[0] - start)
    tracemalloc.stop()
    assert Resources.now().leaked_since(before) == []
    once = 2**20 if WITHOUT_GIL else 2**14  # without the GIL also what threads have of their own
    assert min(grown) < 200 * (cycles // 2) + once, f"{grown} bytes more after {cycles // 2} cycles each"


# -- in processes of their own ----------------------------------------------------------------------

PRELUDE = """
import os, signal, sys, threading, warnings
warnings.simplefilter("error")
import pipegraph as pg
from pipegraph import operators as ops

def graph(work=lambda x: x, **options):
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(10**9)), workers=2).then(work, name="work", workers=3, **options)
    return graph
"""


@pytest.fixture
def python(programs):
    """Runs code; sends SIGINT when it prints READY. Returns (exit code, output, errors)."""

    def run(code, sigint=False):
        with programs.start(PRELUDE + textwrap.dedent(code)) as program:
            if sigint:
                assert program.readline() == "READY\n", program.communicate()
                program.interrupt()
            out, err = program.communicate()
        return program.returncode, out, err

    return run


def test_the_interpreter_exits_with_a_loader_that_nobody_closed(python):
    code, out, err = python(
        """
        loader = graph().loader(epochs=None)
        items = iter(loader)
        next(items)
        print("done")
        """
    )
    assert (code, out, err) == (0, "done\n", "")
