"""loader(isolate=True): the same chunks, states, errors and ends as without it, from a process of its own."""

import errno
import gc
import json
import logging
import os
import resource
import signal
import threading

import numpy as np
import pytest
import torch
from channel_states import wait_until

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.chunk import EndOfEpoch
from pipegraph.engine.meter import Meter
from pipegraph.engine.pass_totals import PassTotals
from pipegraph.engine.process import zygote
from pipegraph.engine.process.process_host import ProcessLink
from pipegraph.engine.sidecar import serving
from pipegraph.engine.staffing import Staffing
from pipegraph.engine.stage.restore import Resume
from pipegraph.errors import GraphError, LoaderClosedError, WorkerDiedError
from pipegraph.loader.runs import isolation_of
from pipegraph.testing import assert_resumes_exactly
from pipegraph.testing.outcome import DeliveredChunk, assert_equal_chunks, is_ordered
from tests.engine.test_resume import CASES, LOOSE

pytestmark = pytest.mark.usefixtures("zygote_there", "no_leaks")


@pytest.fixture(scope="module")
def zygote_there():
    """One zygote for all tests of the file: they are about what it forks."""
    there = zygote.borrow()
    yield
    zygote.release(there)


def steps(make, epochs=2, **options):
    """All chunks, and the state after each."""
    chunks, states = [], []
    with make().loader(epochs=epochs, **options) as loader:
        for _ in range(epochs):
            states.append(json.loads(json.dumps(loader.state_dict())))
            for chunk in loader.chunks():
                chunks.append(DeliveredChunk.of(chunk))
                states.append(json.loads(json.dumps(loader.state_dict())))
        states.append(json.loads(json.dumps(loader.state_dict())))
    return chunks, states


def rest(make, state, epochs, **options):
    """The chunks that follow a state."""
    chunks = []
    with make().loader(epochs=epochs, **options) as loader:
        loader.load_state_dict(state)
        for _ in range(loader.epoch, epochs):
            chunks += [DeliveredChunk.of(chunk) for chunk in loader.chunks()]
    return chunks


@pytest.mark.parametrize("name", CASES)
def test_chunks_and_states_are_those_without_it_and_a_state_continues_in_either(name):
    make = CASES[name]
    chunks, states = steps(make)
    isolated, states_isolated = steps(make, isolate=True)
    assert_equal_chunks(tuple(chunks), tuple(isolated), True, "isolated")
    assert states == states_isolated
    state = states_isolated[len(states_isolated) // 3]
    left = rest(make, state, 2)
    assert_equal_chunks(tuple(left), tuple(rest(make, state, 2, isolate=True)), True, "restored")
    assert left


@pytest.mark.parametrize("name", LOOSE)
def test_below_completion_order_every_sample_comes_once(name):
    make = LOOSE[name]
    assert not is_ordered(make())
    chunks, _ = steps(make)
    isolated, states_isolated = steps(make, isolate=True)
    assert_equal_chunks(tuple(chunks), tuple(isolated), False, "isolated")
    at = len(chunks) // 3
    begun = isolated[:at]
    assert_equal_chunks(
        tuple(chunks), tuple(begun + rest(make, states_isolated[at], 2, isolate=True)), False, "restored"
    )


def graph_of(*steps_, source=None):
    graph = pg.Graph("g", seed=3)
    node = graph.add(source or ops.FromSequence(list(range(20))))
    for step in steps_:
        node = node.then(step)
    return graph


def test_the_stages_run_in_one_other_process():
    graph = graph_of(lambda x: (x, os.getpid()), lambda pair: (*pair, os.getpid()))
    with graph.loader(isolate=True) as loader:
        found = list(loader)
    assert [x for x, *_ in found] == list(range(20))
    first, second = {a for _, a, _ in found}, {b for *_, b in found}
    assert first == second
    assert len(first) == 1
    assert os.getpid() not in first


def test_resumes_exactly_at_every_step():
    def make():
        return graph_of(lambda x: x + 1, ops.Batch(3), source=ops.FromIterable(range(7)))

    assert_resumes_exactly(make, isolate=True)


def test_a_failure_comes_at_its_place_with_its_notes_and_the_state_before_it():
    def fail(x):
        if x == 7:
            raise LookupError("seven")
        return x

    graph = graph_of(fail)
    with graph.loader(isolate=True) as loader:
        found = []
        with pytest.raises(LookupError, match="seven") as caught:
            for x in loader:
                found.append(x)
        state = loader.state_dict()
    assert found == list(range(7))
    assert any("'fail'" in note and "7" in note for note in caught.value.__notes__)
    with graph_of(fail).loader(isolate=True) as loader:
        loader.load_state_dict(state)
        with pytest.raises(LookupError, match="seven"):
            next(iter(loader))


def test_an_operator_that_cannot_be_opened_says_so_at_the_first_iter():
    class Closed(pg.Operator):
        kind = "map"

        def open(self, context):
            raise OSError("no such place")

        def process(self, chunk):
            return chunk

    loader = graph_of(Closed()).loader(isolate=True)
    with pytest.raises(OSError, match="no such place") as caught:
        iter(loader)
    (note,) = caught.value.__notes__
    assert "'closed'" in note
    with pytest.raises(LoaderClosedError):
        iter(loader)


def test_skipped_samples_are_in_the_ledger_and_go_on_in_a_state():
    def fail(x):
        if x % 4 == 1:
            raise ValueError(x)
        return x

    def make():
        graph = pg.Graph("g")
        graph.add(ops.FromIterable(range(14))).then(fail, name="fail", on_error=pg.Skip(5), workers=2)
        return graph

    _, states = steps(make, epochs=1)
    _, states_isolated = steps(make, epochs=1, isolate=True)
    assert states == states_isolated
    with make().loader(isolate=True) as loader:
        loader.load_state_dict(states_isolated[5])
        list(loader)
        profile = loader.profile()
    assert [q.position for q in profile.quarantined] == [1, 5, 9, 13]
    assert profile.stages["fail"].failed > 0


def test_the_first_skipped_sample_or_batch_is_logged_as_without_isolation(caplog):
    def fail(x):
        if 3 in x:
            raise ValueError(3)
        return x

    def said(policy, size, **options):
        caplog.clear()
        graph = pg.Graph("g")
        batches = graph.add(ops.FromSequence(range(8))).then(ops.Batch(size, collate=list))
        batches.then(fail, name="fail", on_error=policy)
        with (
            caplog.at_level(logging.WARNING, logger="pipegraph"),
            graph.loader(epochs=2, **options) as loader,
        ):
            list(loader), list(loader)
        return [record.getMessage() for record in caplog.records]

    for policy in (pg.Skip(5), pg.Retry(1, then=pg.Skip())):
        for size in (1, 2):
            (text,) = said(policy, size, isolate=True)
            assert [text] == said(policy, size)
            assert f"on_error={policy!r} says so" in text


class Unclosable(pg.Operator):
    def process(self, chunk):
        return chunk

    def close(self):
        raise ValueError("cannot close")


def test_an_error_in_close_is_a_warning_as_without_isolation():
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(3)), name="n").then(Unclosable(), name="own").then(
        Unclosable(), name="other"
    )
    found = []
    for isolate in (False, True):
        with pytest.warns(pg.errors.PipegraphWarning) as caught, graph.loader(isolate=isolate) as loader:
            assert list(loader) == [0, 1, 2]
        found.append(sorted(str(each.message) for each in caught))
    assert found[0] == found[1]
    assert found[1] == [
        f"stage {name!r}: close() raised ValueError: cannot close" for name in ("other", "own")
    ]


def test_a_budget_counts_on_after_a_resume():
    def fail(x):
        if x % 4 == 1:
            raise ValueError(x)
        return x

    def make():
        graph = pg.Graph("g")
        graph.add(ops.FromIterable(range(14))).then(fail, name="fail", on_error=pg.Skip(3))
        return graph

    with make().loader(isolate=True) as loader:
        items = iter(loader)
        assert [next(items) for _ in range(6)] == [0, 2, 3, 4, 6, 7]
        state = loader.state_dict()
    with make().loader(isolate=True) as loader:
        loader.load_state_dict(state)
        items = iter(loader)
        assert [next(items) for _ in range(4)] == [8, 10, 11, 12]
        with pytest.raises(ValueError, match="13"):
            next(items)


def test_an_operator_that_cannot_be_sent_is_named():
    lock = threading.Lock()

    def locked(x):
        with lock:
            return x

    graph = graph_of(lambda x: x + 1, locked)
    with pytest.raises(GraphError, match=r"stage 'locked'.*lock.*leave out isolate=True"):
        iter(graph.loader(isolate=True))


def test_a_stage_behind_a_copy_that_is_not_one_to_one_is_refused():
    graph = graph_of(ops.Batch(2), ops.CopyToDevice("cpu", copy=True), ops.Unbatch())
    with pytest.raises(GraphError, match=r"'unbatch'.*is not one-to-one.*'copy'"):
        graph.loader(isolate=True)


def test_what_is_made_cannot_be_sent_is_a_failure_at_its_place():
    def make_lock(x):
        return threading.Lock() if x == 5 else x

    with graph_of(make_lock).loader(isolate=True) as loader:
        found = []
        with pytest.raises(TypeError, match="pickle"):
            for x in loader:
                found.append(x)
    assert found == list(range(5))


def test_copies_to_devices_stay_in_the_training_process():
    def batches(**options):
        graph = graph_of(
            lambda x: {"x": torch.full((300,), x), "pid": os.getpid()},
            ops.Batch(4),
            ops.CopyToDevice("cpu", copy=True),
            lambda batch: {**batch, "here": os.getpid()},
        )
        with graph.loader(**options) as loader:
            found = list(loader)
            return found, loader.profile()

    plain, _ = batches()
    isolated, profile = batches(isolate=True)
    assert len(plain) == len(isolated) == 5
    for one, other in zip(plain, isolated, strict=True):
        assert torch.equal(one["x"], other["x"])
        assert other["here"] == os.getpid()
        assert os.getpid() not in other["pid"].tolist()
    assert [profile.stages[name].items for name in ("fromsequence", "batch", "copy")] == [20, 5, 5]


def test_arrays_that_are_kept_are_never_overwritten():
    with graph_of(lambda x: np.full(50_000, x)).loader(isolate=True) as loader:
        kept = list(loader)
    assert [int(each[0]) for each in kept] == list(range(20))
    assert all((each == each[0]).all() for each in kept)


def test_a_break_continues_with_the_next_epoch():
    graph = graph_of(lambda x: x, source=ops.FromIterable(lambda epoch: range(100 * epoch, 100 * epoch + 9)))
    with graph.loader(isolate=True, epochs=3) as loader:
        for x in loader:
            if x == 3:
                break
        state = loader.state_dict()
        assert list(loader) == list(range(100, 109))
        loader.set_epoch(5)
        assert list(loader) == list(range(500, 509))
    with graph.loader(isolate=True, epochs=3) as loader:
        loader.load_state_dict(state)
        assert list(loader) == list(range(4, 9))


def test_an_endless_source_ends_with_a_break_a_close_and_the_last_reference():
    def endless():
        n = 0
        while True:
            yield n
            n += 1

    for end in ("break", "close", "collect"):
        loader = graph_of(lambda x: x, source=ops.FromIterable(lambda: endless())).loader(isolate=True)
        items = iter(loader)
        assert [next(items) for _ in range(3)] == [0, 1, 2]
        if end == "close":
            loader.close()
            with pytest.raises(LoaderClosedError):
                next(items)
        elif end == "break":
            with loader:
                del items
        del loader
        items = None
        gc.collect()


def test_the_death_of_the_sidecar_is_told_and_the_state_continues(tmp_path):
    flag = tmp_path / "die"
    flag.touch()

    def make():
        def die(x):
            if x == 9 and flag.exists():
                os.kill(os.getpid(), signal.SIGKILL)
            return x

        return graph_of(die, ops.Batch(2, collate=list))

    with make().loader(isolate=True) as loader:
        found = []
        with pytest.raises(WorkerDiedError, match=r"isolate=True.*SIGKILL"):
            for batch in loader:
                found += batch
        state = loader.state_dict()
        assert "die" in loader.profile().stages
    flag.unlink()
    assert found == list(range(len(found)))
    with make().loader(isolate=True) as loader:
        loader.load_state_dict(state)
        assert [x for batch in loader for x in batch] == list(range(len(found), 20))


def test_after_a_death_the_same_loader_continues_with_another_process():
    many = ops.FromSequence(list(range(5000)))
    with graph_of(lambda x: (x, os.getpid()), source=many).loader(isolate=True, epochs=2) as loader:
        items = iter(loader)
        _, pid = next(items)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            for _ in range(5000):
                next(items)
        again = list(loader)
    assert [x for x, _ in again] == list(range(5000))
    assert pid not in {each for _, each in again}


def test_two_loaders_at_once_do_not_meet():
    with (
        graph_of(lambda x: x).loader(isolate=True) as one,
        graph_of(lambda x: -x).loader(isolate=True) as other,
    ):
        assert [a + b for a, b in zip(one, other, strict=True)] == [0] * 20


def test_process_stages_may_run_inside():
    def make():
        graph = pg.Graph("g")
        node = graph.add(ops.FromSequence(list(range(20))))
        node.then(lambda x: (x, os.getpid()), backend="process", workers=2).then(lambda p: (*p, os.getpid()))
        return graph

    with make().loader(isolate=True) as loader:
        found = list(loader)
    assert [x for x, *_ in found] == list(range(20))
    assert not {a for _, a, _ in found} & {b for *_, b in found}


def test_the_profile_shows_the_stages_of_the_sidecar():
    graph = graph_of(lambda x: np.zeros(100), ops.Batch(5))
    with graph.loader(isolate=True, epochs=2) as loader:
        for _ in range(2):
            for _ in loader:
                pass
        during = loader.profile()
    after = loader.profile()
    for profile in (during, after):
        assert {name: stage.items for name, stage in profile.stages.items()} == {
            "fromsequence": 40,
            "map": 40,
            "batch": 8,
        }
        assert profile.passes == 2
    assert after.stages["map"].nbytes == 40 * 800


def test_what_the_sidecar_has_done_before_the_pass_is_looked_at_counts_too(monkeypatch):
    """A short pass is over there before the trainer asks for the first time."""
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(8))).then(lambda x: x, name="work", capacity=16)
    begin = PassTotals.begin

    def late(totals, run):
        wait_until(run.terminal, lambda stats: stats.depth >= 1)  # the sidecar has worked
        return begin(totals, run)

    monkeypatch.setattr(PassTotals, "begin", late)
    with graph.loader(isolate=True) as loader:
        assert list(loader) == list(range(8))
        assert loader._runtime.pass_totals.totals()["items", "work"] == 8


def test_ranks_read_their_own_part():
    found = []
    for rank in range(2):
        with graph_of(lambda x: x).loader(isolate=True, rank=rank, world_size=2) as loader:
            found.append(list(loader))
    assert sorted(found[0] + found[1]) == list(range(20))


def test_a_memory_limit_holds_in_the_sidecar():
    graph = graph_of(lambda x: np.zeros(1 << 20, np.uint8))
    with graph.loader(isolate=True, memory_limit="8 MiB") as loader:
        assert sum(1 for _ in loader) == 20
    with (
        graph.loader(isolate=True, memory_limit="1 KiB") as loader,
        pytest.raises(pg.errors.MemoryLimitError, match="larger than memory_limit"),
    ):
        list(loader)


def no_more_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # poll() refuses to watch more than may be open
    return soft, hard


@pytest.mark.parametrize("where", ["sidecar", "trainer"])
def test_where_no_more_files_may_be_open_the_error_says_so(where):
    def make(x):
        if x == 9 and where == "sidecar":
            no_more_files()
        return np.full(50_000, x)

    kept, limits = [], None
    many = ops.FromSequence(list(range(300)))  # more than is on its way when the trainer gets to its limit
    with graph_of(make, source=many).loader(isolate=True) as loader:
        try:
            with pytest.raises(OSError, match="Too many open files") as caught:
                for array in loader:
                    kept.append(array)
                    if where == "trainer" and limits is None:
                        limits = no_more_files()
        finally:
            if limits is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert any("ulimit -n" in note for note in caught.value.__notes__)
    told = {
        "sidecar": "cannot be sent from its process",
        "trainer": "what the process has sent cannot be received",
    }
    assert [where for where, words in told.items() if words in str(caught.value.__notes__)] == [where]
    assert [int(array[0]) for array in kept] == list(range(len(kept)))


@pytest.mark.parametrize("nbytes", [4 << 20, 10 << 20])
def test_an_item_too_large_for_one_half_names_the_limit_that_the_loader_was_given(nbytes):
    graph = graph_of(lambda x: np.zeros(nbytes, np.uint8))
    with (
        graph.loader(isolate=True, memory_limit="12 MiB") as loader,
        pytest.raises(pg.errors.MemoryLimitError) as caught,
    ):
        list(loader)
    (told,) = [each for each in caught.value.__notes__ if "memory_limit" in each]
    assert [each in told for each in ("is 12.6 MB", "have 9.4 MB", "receives, 3.1 MB")] == [True] * 3


@pytest.mark.parametrize(
    ("owner", "counting"), [(Meter, "in_work_ns"), (Meter, "coreless_ns"), (Staffing, "worked_ns")]
)
def test_a_profile_while_another_thread_begins_a_run(monkeypatch, owner, counting):
    """The start of a run enters the meters of the sidecar's stages."""
    graph = graph_of(lambda x: x, ops.Batch(4), ops.CopyToDevice("cpu", copy=True))
    with graph.loader(isolate=True) as loader:
        items = iter(loader)
        next(items)
        runtime = loader._runs.runtime
        there = {name: runtime.meters[name] for name in ("fromsequence", "batch")}
        counted = getattr(owner, counting)

        def meanwhile(*args):
            if "batch" in runtime.meters:
                for name in there:
                    del runtime.meters[name]
            else:
                runtime.meters.update(there)
            return counted(*args)

        monkeypatch.setattr(owner, counting, meanwhile)
        monkeypatch.setattr(runtime.sidecar, "ask", lambda *_: None)
        loader.profile()
        monkeypatch.undo()
        assert len(list(items)) == 4


@pytest.mark.parametrize(("tail", "here"), [((), 2 << 20), ((ops.CopyToDevice("cpu", copy=True),), 4 << 20)])
def test_the_two_processes_share_one_memory_limit(tail, here):
    graph = graph_of(lambda x: np.zeros(1 << 10, np.uint8), ops.Batch(2), *tail)
    with graph.loader(isolate=True, memory_limit="8 MiB") as loader:
        assert sum(1 for _ in loader) == 10
        runtime = loader._runtime
        there = runtime.sidecar._host._opening[1][0]
        assert (runtime.run.account.limit, there) == (here, (8 << 20) - here)


def test_an_answer_counts_in_the_sidecar_until_the_trainer_asks_again():
    graph = pg.Graph("answers")
    graph.add(ops.FromSequence([np.zeros(2 << 20, np.uint8) for _ in range(4)]), capacity=1)
    above = isolation_of(graph.plan()).above
    runtime = serving.SidecarRuntime(above, (64 << 20, 0, 0, 1), lambda nbytes: None)
    sidecar = serving.Serving(runtime)
    try:
        sidecar.start_run(1, 0, 0, Resume(), {})
        for _ in range(4):
            (answer,), _, _ = sidecar.next(-1, 0, 0)
            assert answer.nbytes == 2 << 20
            assert sidecar._on_the_way == 2 << 20
            assert runtime.run.account.used >= 2 << 20
        (end,), _, _ = sidecar.next(-1, 0, 0)
        assert isinstance(end, EndOfEpoch)
        assert runtime.run.account.used == sidecar._on_the_way == 0
    finally:
        sidecar.close()


def test_a_late_request_to_cancel_a_run_does_not_cancel_the_next(monkeypatch):
    graph = pg.Graph("late")
    graph.add(ops.FromSequence(range(5)))
    runtime = serving.SidecarRuntime(
        isolation_of(graph.plan()).above, (64 << 20, 0, 0, 1), lambda nbytes: None
    )
    sidecar = serving.Serving(runtime)
    start = runtime.start_run

    def started(*args):
        run = start(*args)
        sidecar._cancel(1)
        return run

    monkeypatch.setattr(runtime, "start_run", started)
    try:
        sidecar.start_run(1, 0, 0, Resume(), {})
        assert sidecar.next(-1, 0, 0)[0] == []
        sidecar.start_run(2, 0, 0, Resume(), {})
        assert sidecar.next(-1, 0, 0)[0]
    finally:
        sidecar.close()


def test_a_process_whose_answers_nobody_can_wait_for_is_replaced():
    """poll() fails where the system has no memory for it: what was asked for before comes from the next process."""

    class Broken:
        def select(self, timeout_s):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with graph_of(source=ops.FromSequence(range(2_000))).loader(isolate=True) as loader:
        next(iter(loader))
        host = loader._runtime.sidecar._host
        pid = host.pid
        loader.set_epoch(2)
        host._selector = Broken()
        assert list(loader) == list(range(2_000))
        assert host.pid != pid


def test_an_answer_that_cannot_be_received_for_want_of_descriptors_says_what_to_do(monkeypatch):
    before, receive = iter(("of the start", "of the start of the run")), ProcessLink.receive

    def received(link):
        if next(before, None) is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return receive(link)

    monkeypatch.setattr(ProcessLink, "receive", received)
    graph = pg.Graph()
    graph.add(ops.FromSequence(range(4)))
    with graph.loader(isolate=True) as loader, pytest.raises(OSError) as caught:
        list(loader)
    assert "isolate=True" in caught.value.__notes__[0]
    assert "ulimit" in caught.value.__notes__[0]


def test_ctrl_c_in_the_loop_ends_everything():
    endless = ops.FromIterable(lambda: iter(int, 1))
    with (
        pytest.raises(KeyboardInterrupt),
        graph_of(lambda x: x, source=endless).loader(isolate=True) as loader,
    ):
        for _ in loader:
            signal.raise_signal(signal.SIGINT)


def test_a_resume_at_another_world_size_is_the_same_in_the_other_process():
    def build():
        graph = pg.Graph("resized", seed=5)
        node = graph.add(ops.FromSequence(range(40)), name="numbers").then(ops.Shuffle(5))
        node.then(ops.Batch(2, collate=list))
        return graph

    states = []
    for rank in range(2):
        with build().loader(rank=rank, world_size=2) as loader:
            passing = iter(loader)
            next(passing), next(passing)
            states.append(loader.state_dict())
    found = []
    for isolate in (False, True):
        with build().loader(rank=0, world_size=3, isolate=isolate) as loader:
            loader.load_state_dict(states)
            found.append(list(loader))
    assert found[0] == found[1] and len(found[0]) == 6
