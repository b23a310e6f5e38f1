"""Stages whose operators live in processes: what users write, and what goes wrong with it."""

import ctypes
import dataclasses
import functools
import itertools
import os
import select
import signal
import sqlite3
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.bundle import Bundle
from pipegraph.chunk import Lineages
from pipegraph.contracts import Context, Traits
from pipegraph.engine.process.segments import anonymous_file
from pipegraph.engine.remote.worker import PAGE, Page, ProcessWorker
from pipegraph.errors import GraphError, StageTimeoutError, WorkerDiedError
from pipegraph.testing.outcome import fingerprint
from tests.process.process_pipelines import delivered, pipeline, tell_that_it_hangs

__all__ = ["tell_that_it_hangs"]

pytestmark = pytest.mark.usefixtures("no_leaks")


def test_functions_run_in_other_processes_and_in_order():
    found = delivered(pipeline(lambda x: (x, os.getpid())))
    assert [x for x, _ in found] == list(range(20))
    pids = {pid for _, pid in found}
    assert os.getpid() not in pids
    assert len(pids) <= 2


class Adder:
    def __init__(self, n):
        self.n = n

    def __call__(self, x):
        return x + self.n

    def method(self, x):
        return x + self.n


@pytest.mark.parametrize(
    "fn",
    [lambda x: x + 1, functools.partial(lambda a, x: a + x, 1), Adder(1), Adder(1).method, np.sin, int],
    ids=["lambda", "partial", "object", "method", "ufunc", "type"],
)
def test_any_kind_of_callable(fn):
    assert delivered(pipeline(fn)) == [fn(x) for x in range(20)]


def test_a_function_that_closes_over_other_functions_and_classes():
    @dataclasses.dataclass
    class Point:
        x: int

    def double(x):
        return 2 * x

    found = delivered(pipeline(lambda x: Point(double(x))))
    assert found == [Point(2 * x) for x in range(20)]
    assert all(type(each) is Point for each in found)


def test_async_functions():
    async def work(x):
        return x + 1

    assert delivered(pipeline(work)) == list(range(1, 21))


def test_the_generator_of_a_sample_is_the_same_as_inline():
    def draw(x, rng):
        return float(rng.random())

    inline = pipeline(draw)
    spec = inline.stages["work"]
    inline.stages["work"] = dataclasses.replace(spec, backend="inline", workers=1)
    assert delivered(pipeline(draw)) == delivered(inline)


class Lazy(torch.utils.data.Dataset):
    """As people write it: the connection is opened at first use and kept."""

    def __init__(self, path):
        self.path = path
        self.db = None

    def __len__(self):
        return 50

    def __getitem__(self, i):
        if self.db is None:
            self.db = sqlite3.connect(self.path)
        return self.db.execute("select y from t where x = ?", (i,)).fetchone()[0]


def test_a_data_set_with_a_lazy_handle_has_one_in_each_process(tmp_path):
    path = str(tmp_path / "data.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("create table t (x int, y int)")
        db.executemany("insert into t values (?, ?)", [(x, x * x) for x in range(50)])
    db.close()
    graph = pg.Graph("g")
    source = graph.add(ops.FromSequence(Lazy(path)), workers=3, backend="process")
    source.then(ops.Batch(7))
    with graph.loader(epochs=2) as one, graph.loader() as two:
        for loader in (one, two, one):
            assert torch.cat(list(loader)).tolist() == [x * x for x in range(50)]


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()
    graph = pipeline(lambda x: lock)
    with pytest.raises(GraphError, match=r"stage 'work'.*cannot be sent to another process.*lock"):
        delivered(graph)


def test_a_result_that_cannot_be_sent_is_the_items_own_error():
    graph = pipeline(lambda x: threading.Lock() if x == 3 else x, on_error=pg.Skip(1))
    assert 3 not in delivered(graph)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Picky(Exception):
    def __init__(self, *, code, where):
        super().__init__(f"{code} at {where}")
        self.code = code


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, where, *, code):
        super().__init__(where)
        self.code = code


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeyError("k"),
        lambda: Frozen(3),
        lambda: Picky(code=3, where="x"),
        lambda: Unprintable(),
        lambda: Slotted("x", code=3),
        lambda: FileNotFoundError(2, "no", "f"),
        lambda: UnicodeDecodeError("utf-8", b"a\xff", 1, 2, "invalid start byte"),
        lambda: SyntaxError("no", ("f", 3, 5, "x y", 3, 6)),
        lambda: StopIteration(),
    ],
)
def test_errors_arrive_as_themselves_at_their_place(make):
    error = make()

    def work(x):
        if x == 5:
            raise make()
        return x

    with pipeline(work).loader() as loader:
        found = []
        expected = RuntimeError if isinstance(error, StopIteration) else type(error)
        with pytest.raises(expected) as caught:
            for x in loader:
                found.append(x)
    assert found == [0, 1, 2, 3, 4]
    for name in ("code", "errno", "filename", "reason", "object", "start", "lineno", "text"):
        assert getattr(caught.value, name, None) == getattr(error, name, None)
    if not isinstance(error, StopIteration | Unprintable):
        assert str(caught.value) == str(error)


def test_the_workers_traceback_is_told():
    def work(x):
        raise ValueError("deep down")

    with pytest.raises(ValueError, match="deep down") as caught:
        delivered(pipeline(work))
    assert "in work" in str(caught.value.__cause__)
    assert any("stage 'work', sample 0" in note for note in caught.value.__notes__)


class FailsToOpen(pg.Operator):
    kind = "map"

    def open(self, context):
        raise OSError("no licence")

    def process(self, chunk):
        return chunk


def test_an_operator_that_cannot_be_opened_says_so_at_once():
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(3))).then(FailsToOpen(), name="work", backend="process")
    with pytest.raises(OSError, match="no licence") as caught:
        delivered(graph)
    assert any("stage 'work'" in note for note in caught.value.__notes__)


# -- deaths ----------------------------------------------------------------------------------------


def exits(x):
    if x == 5:
        os._exit(3)
    return x


def faults(x):
    if x == 5:
        ctypes.string_at(0)
    return x


def killed(x):
    if x == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


DEATHS = [(exits, r"called exit\(3\)"), (faults, "SIGSEGV"), (killed, "SIGKILL")]


@pytest.mark.parametrize(("fn", "reason"), DEATHS, ids=["exit", "segfault", "kill"])
@pytest.mark.parametrize("batched", [False, True], ids=["rows alone", "rows in bundles"])
def test_a_sample_that_ends_its_process_twice_is_blamed(fn, reason, batched):
    def make(policy):
        graph = pipeline(fn, on_error=policy)
        if batched:
            graph.add(ops.Batch(4, collate=list), graph.tail)
        return graph

    with make("raise").loader() as loader, pytest.raises(WorkerDiedError, match=f"stage 'work'.*{reason}"):
        list(loader)
    with make(pg.Skip(1)).loader() as loader:
        found = list(loader)
        assert ([*itertools.chain(*found)] if batched else found) == [x for x in range(20) if x != 5]
        (quarantined,) = loader.profile().quarantined
    assert quarantined.key == 5
    assert quarantined.stage == "work"


def test_the_stack_of_a_fault_is_told():
    with pytest.raises(WorkerDiedError) as caught:
        delivered(pipeline(faults))
    assert any("in faults" in note for note in caught.value.__notes__)


def test_memory_that_runs_out_in_a_process_is_the_samples_error():
    def hungry(x):
        import resource

        if x == 3:
            resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
            return len(bytearray(1 << 36))
        return x

    with pytest.raises(MemoryError):
        delivered(pipeline(hungry))


def workers_of(loader):
    return [worker.operator._host.pid for worker in loader._crew.workers["work"]]


def test_processes_that_are_killed_at_any_moment_lose_nothing():
    graph = pipeline(lambda x: np.full(2000, x), items=range(300), workers=2)
    graph.add(ops.Batch(5), graph.tail)
    with graph.loader(epochs=2) as loader:
        for epoch in range(2):
            found = []
            for step, batch in enumerate(loader):
                found += batch[:, 0].tolist()
                if not step % 20:
                    os.kill(workers_of(loader)[step // 20 % 2] or 0, signal.SIGKILL)
            assert found == list(range(300)), epoch


class Counting(pg.Operator):
    kind = "map"

    def __init__(self):
        self.count = 0

    def process(self, chunk):
        self.count += 1
        if self.count == 5:
            os._exit(1)
        return chunk

    def state_dict(self):
        return self.count

    def load_state_dict(self, state):
        self.count = state


def test_a_death_takes_what_an_operator_held_and_ends_the_run():
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(30))).then(Counting(), name="work", backend="process")
    with pytest.raises(WorkerDiedError) as caught:
        delivered(graph)
    assert any("resume from a state" in note for note in caught.value.__notes__)


# -- deadlines -------------------------------------------------------------------------------------


def hangs(tell=lambda: None):
    tell()  # in here: who is told may look at the stack at once
    threading.Event().wait()


def hangs_in_c(tell):
    tell()
    ctypes.PyDLL(None).pause()  # with the GIL


@pytest.mark.parametrize("hang", [hangs, hangs_in_c])
@pytest.mark.parametrize("batched", [False, True], ids=["rows alone", "rows in bundles"])
def test_a_sample_that_takes_too_long_is_named_with_its_stack_and_can_be_skipped(
    hang, batched, tell_that_it_hangs
):
    def work(x):
        if x == 5:
            hang(tell_that_it_hangs)
        return x

    def make(policy):
        graph = pipeline(work, on_error=policy, timeout=0.5)
        if batched:
            graph.add(ops.Batch(4, collate=list), graph.tail)
        return graph

    with make("raise").loader() as loader:
        with pytest.raises(StageTimeoutError, match=r"stage 'work'.*timeout=0.5 s") as caught:
            list(loader)
        assert any(f"in {hang.__name__}" in note for note in caught.value.__notes__)
    with make(pg.Skip(1)).loader() as loader:
        found = list(loader)
        assert ([*itertools.chain(*found)] if batched else found) == [x for x in range(20) if x != 5]
        assert [each.key for each in loader.profile().quarantined] == [5]


def test_work_that_stays_in_the_trainer_has_no_deadline():
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(3))).then(ops.Pin(), backend="process", timeout=1)
    with pytest.raises(
        pg.errors.GraphError, match="timeout= is for work on items, and pin works on the trainer"
    ):
        graph.plan()


# -- the end ---------------------------------------------------------------------------------------


def test_break_and_close_do_not_wait_for_long_items():
    with pipeline(lambda x: hangs() if x == 5 else x).loader() as loader:
        for x in loader:
            if x == 2:
                break


SCRIPT = """
import os, sys, threading
import pipegraph as pg
from pipegraph import operators as ops

def work(x):
    if x == 3:
        print(os.getpid(), os.getppid(), flush=True)
        threading.Event().wait()
    return x

graph = pg.Graph("g")
graph.add(ops.FromSequence(range(10))).then(work, workers=2, backend="process")
{threads}
for x in graph.loader():
    pass
"""


@pytest.mark.parametrize(
    "threads", ["", "threading.Thread(target=threading.Event().wait, daemon=True).start()"]
)
def test_no_process_outlives_a_trainer_that_is_killed(threads, programs):
    trainer = programs.start(SCRIPT.format(threads=threads))
    worker, zygote = map(int, trainer.readline().split())
    ends = [os.pidfd_open(pid) for pid in (worker, zygote)]
    trainer.kill()
    trainer.communicate()
    for end in ends:
        assert select.select([end], [], [], 60)[0]
        os.close(end)


def test_ctrl_c_ends_the_trainer_and_its_processes(programs):
    trainer = programs.start(SCRIPT.format(threads=""), start_new_session=True)
    worker, _ = map(int, trainer.readline().split())
    end = os.pidfd_open(worker)
    trainer.interrupt(group=True)
    _, errors = trainer.communicate()
    assert "KeyboardInterrupt" in errors
    assert select.select([end], [], [], 60)[0]
    os.close(end)


BEFORE = """
import threading
import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine.process.zygote import Zygote

threading.Thread(target=threading.Event().wait, daemon=True).start()  # the zygote is an interpreter of its own
waits = Zygote._wait_until_ready

def waiting(*args):
    print("waits", flush=True)
    waits(*args)

Zygote._wait_until_ready = waiting
graph = pg.Graph("g")
graph.add(ops.FromSequence(range(3))).then(abs, backend="process")
with graph.loader() as loader:
    try:
        list(loader)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    Zygote._wait_until_ready = waits
    print(list(loader))
"""


def test_ctrl_c_before_the_first_batch_leaves_the_loader_usable_and_no_traceback(programs):
    trainer = programs.start(BEFORE, start_new_session=True)
    assert trainer.readline() == "waits\n"
    trainer.interrupt(group=True)
    out, errors = trainer.communicate()
    assert (out, errors) == ("interrupted\n[0, 1, 2]\n", "")


def test_two_loaders_share_one_zygote_and_the_last_ends_it():
    from pipegraph.engine.process import zygote

    graph = pipeline(lambda x: os.getppid())
    with graph.loader() as one:
        first = {*one}
        with graph.loader() as two:
            assert {*two} == first
        assert zygote._users == 1
    assert zygote._shared is None


COLLECTOR = """
import gc, threading
import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine.process import zygote
{threads}

def collects(x):
    return gc.isenabled()

for enabled in (True, False):
    (gc.enable if enabled else gc.disable)()
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(2))).then(collects, backend="process")
    with graph.loader() as loader:
        print(set(loader), gc.isenabled())
    zygote.end_lasting()
"""


@pytest.mark.parametrize(
    "threads", ["", "threading.Thread(target=threading.Event().wait, daemon=True).start()"]
)
def test_the_garbage_collector_is_on_in_workers_where_it_is_on_in_the_trainer(threads, programs):
    done = programs.run(COLLECTOR.format(threads=threads))
    assert (done.stdout, done.stderr) == ("{True} True\n{False} False\n", "")


RENEWED = """
import os, torch
import pipegraph as pg
from pipegraph import operators as ops

set_num_threads, torch.renewed_in = torch.set_num_threads, []

def noted(n):
    torch.renewed_in.append(os.getpid())
    set_num_threads(n)

torch.set_num_threads = noted
graph = pg.Graph("g")
graph.add(ops.FromSequence(range(8))).then(lambda x: os.getpid() in torch.renewed_in, workers=2, backend="process")
with graph.loader() as loader:
    print(*loader)
"""


def test_torchs_thread_pool_is_renewed_in_a_worker_before_it_has_threads(programs):
    """Torch does so at its first use in a fork, and not thread-safely: "INTERNAL ASSERT FAILED", now and then."""
    done = programs.run(RENEWED)
    assert (done.stdout.split(), done.stderr) == (["True"] * 8, "")


def test_a_system_without_what_processes_need_is_told_of(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(GraphError, match="needs Linux: this Python has no pidfd_open; use backend='thread'"):
        delivered(pipeline(lambda x: x))


def test_rows_are_packed_where_they_are_made_and_batches_are_those_of_threads():
    def row(value):
        if value == 5:  # of another type: this bundle cannot be packed
            return {"x": np.arange(3.0) + value, "n": float(value), "s": "five"}
        return {"x": np.arange(3.0) + value, "n": value, "s": str(value)}

    def batches(backend):
        graph = pg.Graph("packed")
        rows = graph.add(ops.FromSequence(range(40))).then(row, name="row", workers=2, backend=backend)
        rows.then(ops.Batch(8), name="batches")
        with graph.loader() as loader:
            return list(map(fingerprint, loader))

    assert batches("thread") == batches("process")


@pytest.mark.parametrize(
    ("rows", "packed"),
    [
        ([torch.ones(3), torch.zeros(3)], True),
        ([{"x": np.arange(3), "n": 1}, {"x": np.arange(3), "n": 2}], True),
        ([torch.ones(3), torch.ones(4)], False),
        ([torch.ones(3, requires_grad=True), torch.ones(3)], False),
        ([torch.ones(1 << 20), torch.ones(1 << 20)], False),  # one more copy would cost more than it saves
        ([torch.ones(3)], False),
    ],
)
def test_a_worker_sends_light_rows_of_a_kind_as_columns(rows, packed):
    class Made:
        traits = Traits()

        def open(self, context):
            pass

        def work_into(self, made, bundle, start):
            for row in rows:
                made.append(row)

    bundle = Bundle(list(range(len(rows))), Lineages("s", list(range(len(rows)))), 0, 0)
    page = anonymous_file(PAGE)
    worker = ProcessWorker(Page(page), Made(), Context(""), ops.Batch(2).packing())
    found, error, _ = worker.work(bundle, 0, len(rows))
    os.close(page)
    assert (error, found.__class__ is not list) == (None, packed)
    again = found.rows() if packed else found
    assert list(map(fingerprint, again)) == list(map(fingerprint, rows))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.quint8),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["quantised", "sparse", "nested"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of what it deprecates and of prototypes
def test_tensors_that_are_more_than_their_bytes_arrive_whole(make):
    def dense(tensor):
        if tensor.is_quantized:
            return tensor.dequantize().tolist(), tensor.q_scale()
        return tensor.to_dense().tolist() if tensor.is_sparse else [each.tolist() for each in tensor.unbind()]

    found = delivered(pipeline(lambda x: make(), range(2)))
    assert [dense(each) for each in found] == [dense(make())] * 2


def test_processes_end_without_a_warning_where_warnings_are_errors():
    code = """
import pipegraph as pg
from pipegraph import operators as ops

graph = pg.Graph("g")
graph.add(ops.FromSequence(range(8)), workers=2, backend="process")
with graph.loader() as loader:
    assert list(loader) == list(range(8))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
