"""What scripts expect of torch's workers: what they inherit, what they are called, how their deaths read."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import select
import signal
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import multiprocessing as mp
from torch.utils import data

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import NotPicklableError, PipegraphWarning

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Holds(data.Dataset[int]):
    """Has something that only a fork of this process can have too."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> int:
        return index


def open_file() -> Any:
    return Path(os.devnull).open()


class Shared(Holds):
    """Counts what all workers read."""

    def __getitem__(self, index: int) -> int:
        with self.thing.get_lock():
            self.thing.value += 1
        return index


@pytest.mark.parametrize(
    "thing",
    [threading.Lock, mp.get_context("fork").Lock, mp.get_context("spawn").Event, open_file],
    ids=["lock", "lock of processes", "event", "open file"],
)
@pytest.mark.parametrize("kept", [False, True])
def test_what_cannot_be_sent_is_inherited(thing: Any, kept: bool) -> None:
    dataset = Holds(thing())
    loaders = [
        kind(
            dataset,
            2,
            True,
            num_workers=2,
            generator=torch.Generator().manual_seed(3),
            persistent_workers=kept,
        )
        for kind in (pg.DataLoader, data.DataLoader)
    ]
    ours, theirs = ([[x.tolist() for x in loader] for _ in range(2)] for loader in loaders)
    assert ours == theirs
    if hasattr(dataset.thing, "close"):
        dataset.thing.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_share_what_multiprocessing_shares(method: str) -> None:
    counter = mp.get_context(method).Value("i", 0)
    assert len(list(pg.DataLoader(Shared(counter), num_workers=2))) == 7
    assert counter.value == 7


SHARED: dict[str, Any] = {
    "tensor": lambda folder: torch.zeros(1).share_memory_(),
    "its array": lambda folder: torch.zeros(1).share_memory_().numpy(),
    "RawArray": lambda folder: np.frombuffer(mp.RawArray("d", 1)),
    "ctypes": lambda folder: np.ctypeslib.as_array(mp.RawArray("d", 1)),
    "mmap": lambda folder: np.frombuffer(mmap.mmap(-1, 8)),
    "memmap": lambda folder: np.memmap(folder / "x", "d", "w+", shape=(1,)),
    "view of memmap": lambda folder: np.asarray(np.memmap(folder / "x", "d", "w+", shape=(2,)))[1:],
    "parameter": lambda folder: torch.nn.Parameter(torch.zeros(1).share_memory_(), requires_grad=False),
    "storage": lambda folder: torch.zeros(8, dtype=torch.uint8).share_memory_().untyped_storage(),
}


class Counter(data.Dataset[int]):
    def __init__(self, counts: Any) -> None:
        self.counts = counts

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        counts = self.counts[0] if isinstance(self.counts, tuple) else self.counts
        counts[0] += 1
        return int(counts[0])


@pytest.mark.parametrize("kind", SHARED)
def test_memory_that_a_dataset_shares_stays_shared(kind: str, tmp_path: Path) -> None:
    dataset = Counter(SHARED[kind](tmp_path))
    loader = pg.DataLoader(dataset, None, num_workers=1, persistent_workers=True)
    assert list(loader) == [1, 2]
    dataset.counts[0] = 7
    assert list(loader) == [8, 9]
    assert dataset.counts[0] == 9
    # Torch's own workers, which have no states of streams, are for what cannot be passed on.
    assert loader._inherits == (kind not in ("tensor", "parameter"))


def test_memory_of_its_own_or_that_nobody_writes_to_is_sent() -> None:
    array = np.arange(3.0)
    with tempfile.NamedTemporaryFile() as file:
        array.tofile(file.name)
        for mode in ("r", "c"):
            loader = pg.DataLoader(np.memmap(file.name, "d", mode), num_workers=1)
            assert [float(each) for each in loader] == [0, 1, 2]
            assert not loader._inherits
    # Arrays that came from worker processes are no memory that the script shares.
    graph = pg.Graph("g")
    graph.add(ops.FromSequence([np.full(1 << 16, 1.0)])).then(lambda row: row + 1, backend="process")
    with graph.loader() as rows:
        loader = pg.DataLoader(list(rows), None, num_workers=1)
        assert [float(each[0]) for each in loader] == [2]
        assert not loader._inherits


def test_a_graph_says_that_its_processes_get_a_copy_of_what_is_shared() -> None:
    dataset = Counter(np.frombuffer(mp.RawArray("d", 1)))
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(dataset), name="rows", backend="process")
    with (
        graph.loader() as loader,
        pytest.warns(PipegraphWarning, match="stage 'rows': its processes get a copy"),
    ):
        assert list(loader) == [1, 2]
    assert dataset.counts[0] == 0


def test_processes_of_a_graph_share_tensors_that_a_dataset_shares(no_leaks: Any) -> None:
    memory = torch.zeros(8).share_memory_()
    dataset = Counter((memory[3:5], memory))  # two tensors of one storage
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(dataset), backend="process")
    for start in (0, 20):
        memory[3] = start
        with graph.loader() as loader:
            assert list(loader) == [start + 1, start + 2]
        assert memory.tolist() == [0, 0, 0, start + 2, 0, 0, 0, 0]


def test_a_stream_that_shares_its_epoch_keeps_its_state() -> None:
    """As Hugging Face's do, so that persistent workers have it."""

    class Stream(data.IterableDataset[int]):
        def __init__(self) -> None:
            self.epoch = torch.tensor(0).share_memory_()
            self.at = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch += epoch - self.epoch

        def __iter__(self) -> Iterator[int]:
            while self.at < 8:
                self.at += 1
                yield 100 * int(self.epoch) + self.at
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at, "epoch": int(self.epoch)}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    loader = pg.DataLoader(Stream(), 2, num_workers=1, persistent_workers=True)
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert [batch.tolist()[1] for batch in loader] == [100 * epoch + number for number in (2, 4, 6, 8)]
    loader.set_epoch(2)
    batches = iter(loader)
    next(batches)
    (again := pg.DataLoader(Stream(), 2, num_workers=1)).load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches]


VIEWS: dict[str, Any] = {
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "shared conjugate": lambda: torch.tensor([1 + 2j]).share_memory_().conj(),
    "negative": lambda: torch.tensor([1 + 2j]).share_memory_().conj().imag,
    "empty": lambda: torch.ones(0).share_memory_(),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "sparse rows": lambda: torch.eye(2).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:.*its processes get a copy", "ignore:Sparse")
@pytest.mark.parametrize("kind", VIEWS)
def test_tensors_that_are_more_than_their_memory_keep_it(kind: str) -> None:
    tensor = VIEWS[kind]()
    graph = pg.Graph("g")
    graph.add(ops.FromSequence([0])).then(lambda _: str(tensor), backend="process")
    with graph.loader() as loader:
        assert list(loader) == [str(tensor)]


class Reduces:
    """Says itself how it is made, so that its ``__getattr__`` meets no empty instance."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __reduce__(self) -> Any:
        return Reduces, (self.inner,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_wrapper_that_says_how_it_is_made_is_sent() -> None:
    graph = pg.Graph("g")
    wrapped = Reduces([1])
    graph.add(ops.FromSequence([0])).then(lambda _: wrapped.index(1), backend="process")
    with graph.loader() as loader:
        assert list(loader) == [0]


class Delegates(data.Dataset[int]):
    """As many wrappers are written."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> int:
        return int(self.inner[index])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_wrapper_that_cannot_be_made_again_is_inherited_and_named() -> None:
    assert list(pg.DataLoader(Delegates([1, 2]), None, num_workers=1)) == [1, 2]
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(Delegates([1, 2])), backend="process")
    named = r"the __getattr__ of Delegates calls itself .*AttributeError for names that begin with '__'"
    with graph.loader() as loader, pytest.raises(NotPicklableError, match=named):
        list(loader)


def test_a_pass_over_what_is_inherited_resumes() -> None:
    def make() -> pg.DataLoader:
        return pg.DataLoader(Holds(threading.Lock()), 2, shuffle=True, num_workers=2)

    loader = make()
    passing = iter(loader)
    next(passing)
    state = loader.state_dict()
    rest = [x.tolist() for x in passing]
    again = make()
    again.load_state_dict(state)
    assert [x.tolist() for x in again] == rest


class Shares(data.IterableDataset[int]):
    """Worker 0 waits until another has delivered all."""

    def __init__(self, gate: Any = None) -> None:
        self.gate = gate

    def __iter__(self) -> Iterator[int]:
        info = data.get_worker_info()
        assert info is not None
        if info.id == 0 and self.gate is not None:
            assert self.gate.wait(60)
        yield from range(10 * info.id, 10 * info.id + 5)


def test_an_iterable_out_of_order_comes_as_it_is_ready() -> None:
    gate = mp.get_context("fork").Event()
    found = []
    for batch in pg.DataLoader(Shares(gate), num_workers=2, in_order=False):
        found.append(int(batch))
        if len(found) == 5:
            gate.set()
    assert found[:5] == [10, 11, 12, 13, 14] and sorted(found[5:]) == [0, 1, 2, 3, 4]
    inherited = Shares()
    inherited.lock = threading.Lock()  # type: ignore[attr-defined]
    loader = pg.DataLoader(inherited, num_workers=2)
    passing = iter(loader)
    assert [int(next(passing)) for _ in range(3)] == [0, 10, 1]
    state = loader.state_dict()
    del passing
    loader.load_state_dict(state)
    assert [int(x) for x in loader] == [11, 2, 12, 3, 13, 4, 14]


def test_an_iterator_names_its_workers_processes() -> None:
    class Who(Holds):
        def __getitem__(self, index: int) -> int:
            return os.getpid()

    passing = iter(pg.DataLoader(Who(None), None, num_workers=2))
    workers = passing._workers
    assert [next(passing) for _ in range(4)] == 2 * [each.pid for each in workers]
    assert all(each.is_alive() and each.exitcode is None for each in workers)
    del passing
    for each in workers:
        each.join(30)
        assert not each.is_alive() and each.exitcode == 0
    workers[0].terminate()  # it has ended: nothing


def test_a_loader_with_persistent_workers_ends_with_its_last_reference() -> None:
    loader = pg.DataLoader(Holds(None), num_workers=1, persistent_workers=True)
    passing = iter(loader)
    next(passing)
    workers = passing._workers
    del passing, loader
    workers[0].join(30)
    assert not workers[0].is_alive()


def test_passes_of_a_trainer_with_threads_share_what_starts_their_workers() -> None:
    class Parent(Holds):
        def __getitem__(self, index: int) -> int:
            return os.getppid()

    loader = pg.DataLoader(Parent(None), None, num_workers=1)
    (first,) = set(loader)
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait)
    thread.start()
    (second,) = set(loader)
    assert first == second
    gate.set()
    thread.join()
    (third,) = set(loader)
    assert third != first  # forked anew: it has what the script has changed in modules
    sentinel = os.pidfd_open(third)
    del loader
    poll = select.poll()
    poll.register(sentinel, select.POLLIN)
    assert poll.poll(30_000)  # it ends with its loader
    os.close(sentinel)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            r"DataLoader worker \(pid \d+\) is killed by signal: Killed",
        ),
        (lambda: os._exit(3), r"DataLoader worker \(pid \d+\) exited unexpectedly with exit code 3"),
    ],
    ids=["killed", "exit"],
)
def test_a_death_reads_as_torchs(end: Any, message: str) -> None:
    class Dies(Holds):
        def __getitem__(self, index: int) -> int:
            end()
            return index

    with pytest.raises(RuntimeError, match=message):
        list(pg.DataLoader(Dies(None), num_workers=1))


def test_a_pass_that_a_death_has_ended_is_gone_with_its_error() -> None:
    class Dies(Holds):
        def __getitem__(self, index: int) -> int:
            os._exit(3)

    passing = iter(pg.DataLoader(Dies(None), num_workers=1))
    held = weakref.ref(passing)
    gc.disable()  # it must not take the collector to end its workers
    try:
        with contextlib.suppress(RuntimeError):
            next(passing)
        del passing
        assert held() is None
    finally:
        gc.enable()


def test_too_many_open_files_says_what_to_do() -> None:
    class Full(Holds):
        def __getitem__(self, index: int) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.raises(RuntimeError, match="ulimit -n"):
        list(pg.DataLoader(Full(None), num_workers=1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("form", ["nested", "sparse"])
def test_tensors_that_default_collate_refuses_are_refused_in_its_words(form: str) -> None:
    dense = torch.ones(2, 2000)
    rows = [torch.nested.nested_tensor(list(dense)) if form == "nested" else dense.to_sparse()] * 4
    for workers in (0, 1):
        with pytest.raises(
            RuntimeError, match=f"{form} tensors are not currently supported by the default collate_fn"
        ):
            next(iter(pg.DataLoader(rows, 2, num_workers=workers)))
