"""semantics.md, "Failures and policies"."""

import json
import threading
import traceback

import pytest
from gates import Gate

import pipegraph as pg
from pipegraph import operators as ops
from tests.engine.breaking_stages import Broken, breaks, collect, make

pytestmark = pytest.mark.usefixtures("no_leaks")


PLACEMENTS = [{"backend": "inline"}, {"workers": 1}, {"workers": 4}, {"workers": 4, "capacity": 1}]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_failure_is_raised_at_its_items_place_as_itself(placement):
    got, error, loader = collect(make(breaks(7, 9), **placement))
    assert got == [0, 1, 2, 3, 4, 5, 6]
    assert type(error) is Broken and error.args == ("no 7",)
    assert error.__notes__ == ["pipegraph: stage 'work', sample 7 at position 7, epoch 0"]
    assert any(frame.name == "work" for frame in traceback.extract_tb(error.__traceback__))
    assert loader.profile().stages["work"].failed >= 1
    *_, loader = collect(make(breaks(0), **placement))
    assert loader.epoch == 1  # a pass that delivered nothing and failed is over all the same


def test_the_lowest_place_wins_whichever_worker_fails_first():
    gate, graph = Gate(), pg.Graph("g")

    def fail(x):
        raise Broken(x)

    graph.add(ops.FromIterable(range(4))).then(gate, workers=4).then(fail, workers=4)
    with graph.loader() as loader:
        items = iter(loader)
        gate.wait_until_waiting(4)
        gate.release_position(3, 2, 1)
        gate.release_position(0)
        with pytest.raises(Broken, match="0"):
            next(items)


def test_after_a_raise_the_pass_is_over_and_the_state_is_that_of_the_last_delivered_chunk():
    with make(breaks(5), 8).loader(epochs=2) as loader:
        items = iter(loader)
        assert [next(items) for _ in range(5)] == [0, 1, 2, 3, 4]
        state = loader.state_dict()
        with pytest.raises(Broken):
            next(items)
        assert loader.state_dict() == state
        with pytest.raises(
            pg.errors.LoaderClosedError, match=r"this pass \(epoch 0\) is over: a stage failed"
        ):
            next(items)
        assert loader.epoch == 1
    with make(breaks(), 8).loader() as loader:
        loader.load_state_dict(state)
        assert list(loader) == [5, 6, 7]


@pytest.mark.parametrize("placement", [{"workers": 3, "ordered": False}])
def test_in_completion_order_a_failure_is_raised_at_once(placement):
    got, error, _ = collect(make(breaks(7), **placement))
    assert type(error) is Broken
    assert error.__notes__ == ["pipegraph: stage 'work', sample 7 at position 7, epoch 0"]
    assert set(got) <= set(range(20)) - {7}


# -- what is not an Exception, and other places where user code runs ----------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_stop_iteration_of_user_code_does_not_end_the_loop_in_silence(placement):
    def stop(x):
        raise StopIteration("early")

    got, error, _ = collect(make(stop, **placement))
    assert got == []
    assert isinstance(error, RuntimeError) and "stage 'work': the function raised StopIteration" in str(error)
    assert isinstance(error.__cause__, StopIteration)


def test_a_failing_flatmap_delivers_the_children_before():
    def children(x):
        yield x
        if x == 2:
            raise Broken(x)
        yield -x

    for placement in PLACEMENTS:
        got, error, _ = collect(make(ops.FlatMap(children), **placement))
        assert got == [0, 0, 1, -1, 2]
        assert "sample 2 at position 2" in error.__notes__[0]


def collate(items):
    if 4 in items:
        raise Broken(items)
    return items


def test_a_failing_collate_names_the_samples_of_its_batch():
    got, error, _ = collect(make(ops.Batch(3, collate=collate)))
    assert got == [[0, 1, 2]]
    assert error.__notes__ == [
        "pipegraph: stage 'work', batch of 3 samples (3, 4, 5) at positions 3..5, epoch 0"
    ]
    got, error, _ = collect(make(ops.Batch(3, collate=collate), items=5))
    assert got == [[0, 1, 2]]
    assert error.__notes__ == [
        "pipegraph: stage 'work', batch of 2 samples (3, 4) at positions 3..4, epoch 0"
    ]


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_failing_open_is_raised_at_once_and_nothing_stays_behind(backend):
    closed = []

    class Opened(pg.Operator):
        def process(self, chunk):
            return chunk

        def close(self):
            closed.append("opened")

    class NotOpened(Opened):
        def open(self, context):
            raise Broken("cannot open")

        def close(self):
            closed.append("not opened")

    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(3))).then(Opened(), backend=backend).then(
        NotOpened(), name="bad", workers=2, backend=backend
    )
    with graph.loader() as loader:
        with pytest.raises(Broken, match="cannot open") as caught:
            iter(loader)
        assert "stage 'bad': worker" in caught.value.__notes__[0]
        with pytest.raises(pg.errors.LoaderClosedError):
            iter(loader)
    assert closed == ["opened"]


# -- Skip ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_skip_leaves_failing_items_out_and_keeps_a_ledger(placement):
    got, error, loader = collect(make(breaks(3, 11), on_error=pg.Skip(), **placement))
    assert error is None and got == [x for x in range(20) if x not in (3, 11)]
    ledger = loader.profile().quarantined
    assert [(q.key, q.position, q.epoch, q.stage, q.error) for q in ledger] == [
        (3, 3, 0, "work", "Broken: no 3"),
        (11, 11, 0, "work", "Broken: no 11"),
    ]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_failure_that_exceeds_a_count_is_raised_at_its_place_with_a_note_that_names_the_budget(placement):
    got, error, loader = collect(make(breaks(3, 5, 11, 13), on_error=pg.Skip(2), **placement))
    assert got == [x for x in range(11) if x not in (3, 5)]
    assert type(error) is Broken and error.args == ("no 11",)
    assert "failure 3 of 12 items exceeds the budget of 2 in on_error=Skip(budget=2)" in error.__notes__[0]
    assert [q.key for q in loader.profile().quarantined][:2] == [3, 5]


def test_budgets_count_from_the_last_start():
    def graph():
        return make(breaks(1, 3, 15), on_error=pg.Skip(2))

    with graph().loader() as loader:
        assert [x for _, x in zip(range(3), loader, strict=False)] == [0, 2, 4]
        state = json.loads(json.dumps(loader.state_dict()))
    with graph().loader() as loader:
        loader.load_state_dict(state)
        assert list(loader) == [x for x in range(5, 20) if x != 15]
        assert [q.key for q in loader.profile().quarantined] == [1, 3, 15]


def test_a_state_holds_the_count_and_the_last_64_entries_and_the_profile_all():
    graph = make(breaks(*range(0, 300, 2)), 300, on_error=pg.Skip())
    with graph.loader() as loader:
        for _ in loader:
            state = loader.state_dict()
        assert len(loader.profile().quarantined) == 150
    count, entries = state["rank0"]["ledger"]
    assert count == 150 and len(entries) == 64
    assert len(json.dumps(state)) < 12_000


# -- Retry -----------------------------------------------------------------------------------------


class Flaky:
    """Fails the first ``times`` tries of some items."""

    def __init__(self, times, *bad):
        self.left = dict.fromkeys(bad, times)
        self.lock = threading.Lock()

    def __call__(self, x):
        with self.lock:
            if self.left.get(x, 0):
                self.left[x] -= 1
                raise Broken(f"not yet {x}")
        return x


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_retry_tries_again_up_to_so_many_times(placement):
    got, error, loader = collect(make(Flaky(2, 3, 7), on_error=pg.Retry(2), **placement))
    assert error is None and got == list(range(20))
    assert loader.profile().stages["work"].retried == 4
    got, error, loader = collect(make(Flaky(3, 3), on_error=pg.Retry(2), **placement))
    assert got == [0, 1, 2] and error.args == ("not yet 3",)
    assert loader.profile().stages["work"].retried == 2
    got, error, loader = collect(make(Flaky(2, *range(300)), 300, on_error=pg.Retry(2), **placement))
    assert error is None and got == list(range(300))  # of a bundle each row has its tries


def test_retry_then_skip():
    got, error, loader = collect(make(Flaky(9, 3), on_error=pg.Retry(1, then=pg.Skip(1))))
    assert error is None and 3 not in got and len(got) == 19
    assert [q.key for q in loader.profile().quarantined] == [3]
