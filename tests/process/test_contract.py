"""What every backend with workers of its own must do: one contract for all in ``BACKENDS``.

Those that need a cluster are tested by ``tests/ray/test_ray_contract.py``, with the same functions.
"""

import os
import threading

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.backends import BACKENDS
from pipegraph.engine.remote import host as hosts
from pipegraph.errors import GraphError, StageTimeoutError, WorkerDiedError
from pipegraph.testing.outcome import placed

pytestmark = pytest.mark.usefixtures("no_leaks")

WITH_WORKERS = [each for each in BACKENDS.values() if each.pool]


@pytest.fixture(params=[each for each in WITH_WORKERS if not each.on_nodes])
def backend(request):
    return request.param


def pipeline(backend, fn, items=20, workers=2, **options):
    graph = pg.Graph("contract", seed=3)
    numbers = graph.add(ops.FromSequence(range(items)), name="numbers")
    operator = fn if isinstance(fn, pg.Operator) else ops.Map(fn)
    graph.tail = numbers.then(operator, name="work", backend=backend, workers=workers, **options)
    return graph


def delivered(graph, **options):
    with graph.loader(**options) as loader:
        return list(loader)


def left_out(graph):
    """What is delivered, and the positions and errors of what is not."""
    with graph.loader() as loader:
        found = list(loader)
        return found, {each.position: each.error for each in loader.profile().quarantined}


def test_items_come_in_order_from_other_processes(backend):
    found = delivered(pipeline(backend, lambda x: (x, os.getpid())), epochs=2)
    assert [x for x, _ in found] == [*range(20)]
    assert os.getpid() not in {pid for _, pid in found}


def test_arrays_tensors_and_random_numbers_are_those_of_threads(backend):
    def work(x, rng):
        return {"a": np.full((300, 3), x), "t": torch.full((7,), x), "r": rng.random(2_000), "s": str(x)}

    ours, threads = (
        delivered(placed(pipeline(each, work), each, 1)) for each in (backend, BACKENDS["thread"])
    )
    for mine, its in zip(ours, threads, strict=True):
        assert mine["s"] == its["s"]
        assert all(np.array_equal(mine[name], its[name]) for name in ("a", "t", "r"))
        mine["a"] += 1
        mine["t"] += 1


def test_an_error_keeps_its_type_and_place(backend):
    def work(x):
        return 1 // (x - 5)

    with pytest.raises(ZeroDivisionError) as caught:
        delivered(pipeline(backend, work))
    assert "in work" in str(caught.value.__cause__)
    assert any("stage 'work'" in note for note in caught.value.__notes__)


class Opened(pg.Operator):
    kind = "map"

    def __init__(self, fails=None):
        self.fails = fails

    def open(self, context):
        if self.fails == "open":
            raise OSError("no licence")

    def process(self, chunk):
        return chunk

    def close(self):
        if self.fails == "close":
            raise OSError("no disk")


def test_an_error_of_open_is_raised_at_the_start(backend):
    with pytest.raises(OSError, match="no licence"):
        delivered(pipeline(backend, Opened("open")))


class OpensLong(Opened):
    def open(self, context):
        sum(range(5_000_000))  # longer than the timeout on any machine


def test_the_timeout_of_rows_is_not_one_of_open(backend):
    assert delivered(pipeline(backend, OpensLong(), items=0, workers=1, timeout=0.001)) == []


def test_what_cannot_be_sent_is_named_before_anything_starts(backend):
    lock = threading.Lock()
    with pytest.raises(
        GraphError, match=r"stage 'work': the operator cannot be sent to another process.*lock"
    ):
        delivered(pipeline(backend, lambda x: lock and x))


def test_a_result_that_cannot_be_sent_is_the_items_own_error(backend):
    def work(x):
        return threading.Lock() if x == 7 else x

    found, lost = left_out(pipeline(backend, work, on_error=pg.Skip(1)))
    assert found == [x for x in range(20) if x != 7]
    assert list(lost) == [7]


def test_a_row_that_ends_its_worker_is_blamed_and_the_others_are_done_again(backend):
    def work(x):
        if x == 6:
            os._exit(3)
        return x

    found, lost = left_out(pipeline(backend, work, workers=1, on_error=pg.Skip(1)))
    assert found == [x for x in range(20) if x != 6]
    assert list(lost) == [6]
    assert WorkerDiedError.__name__ in lost[6]


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """A file that a function makes before it hangs: no other row is overdue, however slow the machine is."""
    mark, start = tmp_path / "hangs", hosts.Host._start

    def starts(host):
        start(host)
        look, overdue = host._running.look, host._running.overdue

        def looks():
            row, spent_s = look()
            return row, spent_s if mark.exists() else 0.0

        def ends(row):
            mark.unlink()
            return overdue(row)

        host._running.look, host._running.overdue = looks, ends

    monkeypatch.setattr(hosts.Host, "_start", starts)
    return mark


def hang(mark, x):
    mark.touch()
    threading.Event().wait()
    return x


def test_a_row_that_passes_its_deadline_is_named_and_costs_no_other(backend, hanging):
    def work(x):
        return hang(hanging, x) if x == 6 else x

    found, lost = left_out(pipeline(backend, work, workers=1, timeout=0.2, on_error=pg.Skip(1)))
    assert found == [x for x in range(20) if x != 6]
    assert list(lost) == [6]
    assert StageTimeoutError.__name__ in lost[6]


def test_close_does_not_wait_for_an_item(backend, monkeypatch, tmp_path):
    monkeypatch.setattr(hosts.Host.close, "__defaults__", (0.1,))
    mark = tmp_path / "inside"
    os.mkfifo(mark)

    def work(x):
        mark.write_text("x")
        threading.Event().wait()

    loader = pipeline(backend, work, workers=1).loader()
    thread = threading.Thread(target=lambda: mark.read_text() and loader.close(), daemon=True)
    thread.start()
    with pytest.raises(Exception, match="closed"):
        list(loader)
    thread.join(60)
    assert not thread.is_alive()


def test_a_pass_left_early_leaves_nothing_to_the_next(backend):
    with pipeline(backend, lambda x: x + 1, items=60).loader() as loader:
        for stop in (3, 1, 20):
            for x, found in enumerate(loader):
                assert found == x + 1
                if x == stop:
                    break
        assert list(loader) == [*range(1, 61)]


def test_a_state_resumes_exactly(backend):
    graph = pipeline(backend, lambda x, rng: (x, float(rng.random())), items=30)
    with graph.loader() as loader:
        items = iter(loader)
        begun = [next(items) for _ in range(11)]
        state = loader.state_dict()
    with graph.loader() as loader:
        loader.load_state_dict(state)
        assert begun + list(loader) == delivered(graph)


def test_sources_and_operators_of_every_kind(backend):
    def graph(backend):
        graph = pg.Graph("kinds", seed=1)
        read = graph.add(ops.FromSequence(range(30), shuffle=True), name="read", backend=backend)
        kept = read.then(ops.Filter(lambda x: x % 3), name="keep", backend=backend)
        many = kept.then(ops.FlatMap(lambda x: range(x % 4)), name="many", backend=backend)
        many.then(ops.Batch(4), name="batch", backend=backend)
        return graph

    found, expected = (delivered(graph(each)) for each in (backend, "thread"))
    assert [batch.tolist() for batch in found] == [batch.tolist() for batch in expected]
    counted = pg.Graph("iterable")
    counted.add(ops.FromIterable(lambda: iter(range(150))), backend=backend)
    assert delivered(counted) == [*range(150)]
