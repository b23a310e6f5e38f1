"""``timeout=`` in threads: a thread that hangs costs its item, and nothing else."""

import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import concurrency, operators as ops
from pipegraph.engine.remote.contract import Overdue
from pipegraph.engine.remote.deadline_host import _Progress
from pipegraph.engine.remote.host import Host
from pipegraph.errors import GraphError, StageTimeoutError, StuckWorker
from pipegraph.testing.outcome import fingerprint

TIMEOUT_S = 0.3


class Stuck:
    """What hangs until the test is over. Only rows that hang in it are overdue: on a busy machine any row may take long."""

    def __init__(self):
        self.inside, self.over = threading.Event(), threading.Event()
        self.hanging = []

    def wait(self):
        self.hanging.append(threading.current_thread()._target.__self__._progress)
        self.inside.set()
        self.over.wait()


@pytest.fixture(autouse=True)
def stuck(no_leaks, monkeypatch):
    gate, look = Stuck(), _Progress.look

    def looks(progress):
        row, spent_s, member = look(progress)
        return row, spent_s if progress in gate.hanging else 0.0, member

    monkeypatch.setattr(_Progress, "look", looks)
    before = set(threading.enumerate())
    yield gate
    gate.over.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def pipeline(fn, items=range(12), batch=None, **options):
    graph = pg.Graph("g", seed=3)
    rows = graph.add(ops.FromSequence(items))
    tail = rows.then(fn, name="work", timeout=TIMEOUT_S, **{"workers": 2, **options})
    if batch:
        tail.then(ops.Batch(batch, collate=list))
    return graph


def hangs_at(number, gate):
    def waits_for_ever(x):
        if x == number:
            gate.wait()
        return x * 10

    return waits_for_ever


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("batch", [None, 4], ids=["rows alone", "rows in bundles"])
def test_an_item_that_hangs_is_skipped_with_an_exact_ledger(stuck, workers, batch):
    graph = pipeline(hangs_at(5, stuck), batch=batch, workers=workers, on_error=pg.Skip(1))
    loader = graph.loader()
    found = list(loader)
    (entry,) = loader.profile().quarantined
    with pytest.warns(StuckWorker, match="stage 'work'.*timeout=0.3 s"):
        loader.close()
    flat = [x for rows in found for x in rows] if batch else found
    assert flat == [x * 10 for x in range(12) if x != 5]
    assert (entry.key, entry.position, entry.stage) == (5, 5, "work")
    assert "longer than timeout=0.3 s" in entry.error


def test_the_error_names_the_stage_and_where_the_thread_stands(stuck):
    with (
        pytest.warns(StuckWorker),
        pipeline(hangs_at(2, stuck)).loader() as loader,
        pytest.raises(StageTimeoutError, match="stage 'work': .*its thread was left alone") as caught,
    ):
        list(loader)
    assert any("in waits_for_ever" in note for note in caught.value.__notes__)
    assert any("position 2" in note for note in caught.value.__notes__)


def test_what_was_done_before_the_item_that_hangs_is_not_done_again(stuck):
    done = []

    def appends(row):
        done.append(row["n"])
        if row["n"] == 6:
            stuck.wait()
        row["seen"] = row.get("seen", 0) + 1  # in place: a second time would show
        return row

    items = [{"n": n} for n in range(12)]
    graph = pipeline(appends, items=items, batch=4, workers=1, on_error=pg.Skip(1))
    with pytest.warns(StuckWorker), graph.loader() as loader:
        found = [row for rows in loader for row in rows]
    assert [(row["n"], row["seen"]) for row in found] == [(n, 1) for n in range(12) if n != 6]
    assert sorted(done) == list(range(12))


def test_a_thread_that_returns_too_late_is_not_heard_and_ends(stuck):
    late = []

    def slow(x):
        if x == 3:
            late.append(threading.current_thread())
            stuck.wait()
        return x

    with pipeline(slow, batch=4, on_error=pg.Skip(1)).loader() as loader:
        running = iter(loader)
        found = next(running) + next(running)
        stuck.over.set()
        found += [x for rows in running for x in rows]
        late[0].join(60)
    assert found == [x for x in range(12) if x != 3]


def test_a_deadline_changes_nothing_else():
    def work(x, rng):
        return {"x": np.full(3, x), "r": rng.random()}

    def chunks(**options):
        graph = pg.Graph("g", seed=3)
        rows = graph.add(ops.FromSequence(range(20))).then(work, name="work", workers=2, **options)
        rows.then(ops.FlatMap(lambda row: [row, row]), name="twice", **options).then(ops.Batch(3), **options)
        with graph.loader() as loader:
            return list(map(fingerprint, loader))

    assert chunks(timeout=60) == chunks()


def test_errors_of_the_function_are_its_own_objects():
    error = KeyError("mine")

    def fails(x):
        raise error

    with pipeline(fails).loader() as loader, pytest.raises(KeyError) as caught:
        list(loader)
    assert caught.value is error


class Sequential:
    def __init__(self, gate):
        self.gate = gate

    def __iter__(self):
        yield 1
        self.gate.wait()
        yield 2


def test_a_source_that_hangs_ends_with_its_stack(stuck):
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(Sequential(stuck)), name="read", timeout=TIMEOUT_S)
    loader = graph.loader()
    with pytest.raises(StageTimeoutError, match="stage 'read'") as caught:
        list(loader)
    with pytest.warns(StuckWorker):
        loader.close()
    assert any("in __iter__" in note for note in caught.value.__notes__)


class Slow(pg.Operator):
    def __init__(self, gate):
        self.gate = gate
        self.total = 0

    def process(self, chunk):
        if chunk.data == 3:
            self.gate.wait()
        self.total += chunk.data
        chunk.data = self.total
        return chunk

    def state_dict(self):
        return self.total

    def load_state_dict(self, state):
        self.total = state


def test_what_an_operator_holds_is_lost_with_its_thread_whatever_the_policy(stuck):
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(6))).then(
        Slow(stuck), name="sum", timeout=TIMEOUT_S, on_error=pg.Skip(3)
    )
    with pytest.warns(StuckWorker), graph.loader() as loader, pytest.raises(StageTimeoutError, match="'sum'"):
        list(loader)


def test_break_goes_on_with_the_next_epoch_and_leaves_no_thread():
    with pipeline(lambda x: x, items=range(100)).loader() as loader:
        for x in loader:
            if x == 5:
                break
        assert list(loader) == list(range(100))


def test_an_item_that_hangs_in_a_pass_that_was_left_costs_the_next_pass_nothing(stuck):
    inside = threading.Event()

    def hangs_once(x):
        if x == 3 and not inside.is_set():
            inside.set()
            stuck.wait()
        return x

    loader = pipeline(hangs_once, workers=1).loader()
    for x in loader:
        if x == 2:
            assert inside.wait(60)
            break
    assert list(loader) == list(range(12))
    assert not loader.profile().quarantined
    with pytest.warns(StuckWorker):
        loader.close()


def test_an_operator_that_cannot_be_opened_says_so():
    class Closed(pg.Operator):
        def open(self, context):
            raise OSError("no licence")

        def process(self, chunk):
            return chunk

    with pipeline(Closed()).loader() as loader, pytest.raises(OSError, match="no licence"):
        list(loader)


def test_the_time_in_which_the_whole_job_is_stopped_counts_for_no_row(monkeypatch):
    """A stopped job: the wait for half a second ends a hundred seconds later, with the row in work where it was."""
    now, slept = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], monotonic_ns=lambda: int(now[0] * 1e9))
    monkeypatch.setattr(concurrency, "monotonic", clock.monotonic)
    monkeypatch.setattr(concurrency, "monotonic_ns", clock.monotonic_ns)

    def sleep(seconds):
        slept.append(seconds)
        now[0] += 100 if len(slept) == 1 else seconds
        return False

    overdue = []
    host = SimpleNamespace(
        _link=SimpleNamespace(look=lambda: (7, now[0], 0), gone=()),
        _ready=sleep,
        _overdue=lambda row, member: overdue.append(row) or Overdue(row, ""),
    )
    with pytest.raises(Overdue):
        Host._await(host, 0.5)
    assert overdue == [7]
    assert slept == pytest.approx([0.5, 0.5])


def test_closing_does_not_wait_for_a_deadline(stuck):
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(6))).then(hangs_at(0, stuck), name="work", timeout=600)
    loader = graph.loader()
    closer = threading.Thread(target=lambda: (stuck.inside.wait(), loader.close()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StuckWorker)
        closer.start()
        with pytest.raises(Exception, match="closed"):
            list(loader)
        closer.join(60)
    assert not closer.is_alive()


@pytest.mark.parametrize(
    ("operator", "backend", "message"),
    [
        (ops.Map(abs), "inline", "timeout= needs backend='thread' or 'process': an inline stage"),
        (ops.Pin(), "thread", "timeout= is for work on items, and pin works on the trainer's own"),
    ],
)
def test_where_no_deadline_can_be_kept_the_plan_says_so(operator, backend, message):
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(3))).then(operator, backend=backend, timeout=1)
    with pytest.raises(GraphError, match=message):
        graph.plan()
