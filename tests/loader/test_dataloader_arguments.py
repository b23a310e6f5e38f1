"""Each argument that torch documents for its ``DataLoader``, and what ``pg.DataLoader`` adds."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import data

import pipegraph as pg
from tests.process.process_pipelines import tell_that_it_hangs

__all__ = ["tell_that_it_hangs"]
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Squares(data.Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index * index


class Who(Squares):
    """Tells which worker reads a sample."""

    ready = ""

    def __getitem__(self, index: int) -> Any:
        info = data.get_worker_info()
        assert info is None or info.dataset is self
        place = None if info is None else (info.id, info.num_workers, info.seed)
        return index, os.getpid(), place, self.ready


def numbers(loader: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def test_the_import_is_all_that_changes() -> None:
    loader = pg.DataLoader(Squares(), 4, True, num_workers=2, generator=torch.Generator().manual_seed(1))
    assert isinstance(loader, data.DataLoader)
    theirs = data.DataLoader(Squares(), 4, True, generator=torch.Generator().manual_seed(1))
    assert numbers(loader) == numbers(theirs)
    assert len(loader) == 3 and loader.batch_size == 4 and isinstance(loader.dataset, Squares)
    assert isinstance(loader.sampler, data.RandomSampler) and loader.prefetch_factor == 2


def test_workers_have_their_number_their_seed_and_their_own_copy_of_the_data_set() -> None:
    def prepare(worker: int) -> None:
        info = data.get_worker_info()
        assert info is not None
        info.dataset.ready = f"by {worker}"  # type: ignore[attr-defined]

    dataset = Who()
    loader = pg.DataLoader(
        dataset, None, num_workers=2, worker_init_fn=prepare, generator=torch.Generator().manual_seed(5)
    )
    base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(5)))
    found = list(loader)
    assert [tuple(each[2]) for each in found] == [
        (i % 2, 2, base_seed + i % 2) for i in range(10)
    ]  # dealt in turn
    assert [each[3] for each in found] == [f"by {i % 2}" for i in range(10)]
    assert len({each[1] for each in found} | {os.getpid()}) == 3
    assert dataset.ready == "" and data.get_worker_info() is None


def test_persistent_workers_live_on_and_others_see_the_data_set_as_it_is_now() -> None:
    def pids(loader: Any) -> set[int]:
        return {each[1] for each in loader}

    kept = pg.DataLoader(Who(), None, num_workers=2, persistent_workers=True)
    assert pids(kept) == pids(kept)
    dataset = Who()
    fresh = pg.DataLoader(dataset, None, num_workers=1)
    first = pids(fresh)
    dataset.ready = "epoch 1"
    again = list(fresh)
    assert {each[1] for each in again} != first and {each[3] for each in again} == {"epoch 1"}


class Hangs(Squares):
    def __init__(self, tell_that_it_hangs: Callable[[], None]) -> None:
        self.tell = tell_that_it_hangs

    def __getitem__(self, index: int) -> int:
        if index == 3:
            self.tell()
            threading.Event().wait()
        return index


def test_timeout(tell_that_it_hangs: Callable[[], None]) -> None:
    passing = iter(pg.DataLoader(Hangs(tell_that_it_hangs), None, num_workers=1, timeout=1))
    assert [next(passing) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds"):
        next(passing)


def test_prefetch_factor_is_how_many_batches_each_worker_reads_ahead(tmp_path: Path) -> None:
    drawn = []

    class Sampler(data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            for i in range(100):
                drawn.append(i)
                yield i % 10

    passing = iter(pg.DataLoader(Squares(), None, sampler=Sampler(), num_workers=2, prefetch_factor=3))
    assert len(drawn) == 6  # in the consumer's thread, before the first batch is asked for
    next(passing)
    assert len(drawn) == 7


def paired(batch: list[int]) -> list[int]:
    return [*batch, -1]


def draw_first(worker: int) -> None:
    torch.rand(worker + 1)


class Noisy(Squares):
    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(()))


ARGUMENTS: dict[str, dict[str, Any]] = {
    "dataset": {"dataset": data.ConcatDataset([Squares(), data.Subset(Squares(), [3, 1])])},
    "batch_size": {"batch_size": 4},
    "shuffle": {"shuffle": True},
    "sampler": {"sampler": [5, 1, 1]},
    "batch_sampler": {"batch_sampler": [[5, 1], (1,), [2, 3, 4]]},
    "num_workers": {"num_workers": 3, "dataset": Noisy()},
    "collate_fn": {"collate_fn": paired, "batch_size": 3},
    "pin_memory": {"pin_memory": True},
    "drop_last": {"drop_last": True, "batch_size": 3},
    "timeout": {"timeout": 60, "num_workers": 1},
    "worker_init_fn": {"worker_init_fn": draw_first, "num_workers": 2, "dataset": Noisy()},
    "multiprocessing_context": {"multiprocessing_context": "fork", "num_workers": 1},
    "generator": {"generator": 7, "shuffle": True, "num_workers": 2, "dataset": Noisy()},
    "prefetch_factor": {"prefetch_factor": 1, "num_workers": 2},
    "persistent_workers": {"persistent_workers": True, "num_workers": 2, "dataset": Noisy()},
    "pin_memory_device": {"pin_memory_device": "", "pin_memory": True},
    "in_order": {"in_order": False, "num_workers": 1, "batch_size": 2},
}
"""Each argument that torch documents, in use."""


@pytest.mark.filterwarnings("ignore:.*pin_memory", "ignore:This DataLoader will create")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_documented_argument_has_torchs_effect(name: str) -> None:
    def two_epochs(kind: Any) -> list[Any]:
        torch.manual_seed(3)
        options = dict(ARGUMENTS[name])
        if "generator" in options:
            options["generator"] = torch.Generator().manual_seed(options["generator"])
        loader = kind(**{"dataset": Squares(), **options})
        kept = (
            getattr(loader, name)
            if name not in ("shuffle", "generator", "sampler", "batch_sampler")
            else name
        )
        return [
            str(kept).split(" object")[0],
            len(loader),
            *[str(batch) for _ in range(2) for batch in loader],
        ]

    assert two_epochs(data.DataLoader) == two_epochs(pg.DataLoader)


def test_no_argument_of_torchs_is_left_out() -> None:
    assert ARGUMENTS.keys() == inspect.signature(data.DataLoader).parameters.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "num_workers option should be non-negative"),
        ({"prefetch_factor": 2}, "prefetch_factor option could only be specified in multiprocessing"),
        ({"persistent_workers": True}, "persistent_workers option needs num_workers > 0"),
        ({"num_workers": 1, "multiprocessing_context": "x"}, "should specify a valid start method"),
        ({"workers": "thread", "num_workers": 1, "timeout": 3}, "need workers='process'"),
    ],
)
def test_wrong_arguments_are_torchs_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pg.DataLoader(Squares(), **options)


# -- threads -----------------------------------------------------------------------------------


class Noisy(Squares):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3) + index


# -- states ------------------------------------------------------------------------------------


class Remembers(data.IterableDataset[int]):
    """Says where it stands, so that nothing is read again."""

    def __init__(self) -> None:
        self.next = 0
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        start, self.next = self.next, 0
        for i in range(start, 20):
            self.read += 1
            self.next = i + 1
            yield i
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


PLACES: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "workers": "thread"}]


@pytest.mark.parametrize(
    ("kind", "place"),
    [("seeded", PLACES[0]), ("global sampler", PLACES[1]), ("stateful", PLACES[1]), ("shuffled", PLACES[2])],
)
def test_a_pass_resumes_anywhere(kind: str, place: dict[str, Any]) -> None:
    def make() -> pg.DataLoader:
        if kind == "stateful":
            return pg.DataLoader(Remembers(), 3, **place)
        if kind == "global sampler":
            return pg.DataLoader(range(20), 3, sampler=data.SubsetRandomSampler(range(4, 19)), **place)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(3) if kind == "seeded" else None
        return pg.DataLoader(range(20), 3, True, generator=generator, **place)  # type: ignore[arg-type]

    torch.manual_seed(0)
    loader = make()
    states = [loader.state_dict()]
    whole = []
    for batch in loader:
        whole.append(batch.tolist())
        states.append(loader.state_dict())
    for done in range(0, len(states), 3):
        torch.manual_seed(9)
        again = make()
        again.load_state_dict(states[done])
        assert again.state_dict() == states[done]
        if done:  # before the first batch an order is yet to be drawn
            assert numbers(again) == whole[done:], done
    assert loader.state_dict()["rank0"][0]["batches"] == 0


def test_a_state_that_does_not_fit_is_refused() -> None:
    with pytest.raises(pg.errors.StateError, match="not the state of a pg.DataLoader"):
        pg.DataLoader(range(3)).load_state_dict({"x": 1})  # type: ignore[arg-type]
    state = pg.DataLoader(Remembers(), num_workers=3).state_dict()
    with pytest.raises(pg.errors.StateError, match="resume with num_workers=3"):
        pg.DataLoader(Remembers(), num_workers=2).load_state_dict(state)


def test_set_epoch_reaches_the_sampler() -> None:
    def orders(kind: Any) -> list[Any]:
        sampler = data.DistributedSampler(range(10), 2, 1, seed=4)  # type: ignore[arg-type]
        loader = kind(range(10), 2, sampler=sampler)
        found = []
        for epoch in (3, 5):
            (loader if kind is pg.DataLoader else sampler).set_epoch(epoch)
            found.append(numbers(loader))
        return found

    assert orders(pg.DataLoader) == orders(data.DataLoader)


# -- the pipeline ------------------------------------------------------------------------------
