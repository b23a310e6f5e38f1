"""States of a ``pg.DataLoader`` where they are taken: inside a pass, at its ends, in workers with states of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import data

import pipegraph as pg

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

PLACES = [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


def flat(loader: Any) -> list[Any]:
    return [row for batch in loader for row in (batch.tolist() if isinstance(batch, torch.Tensor) else batch)]


class Squares(data.Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


class Counts(Squares):
    """Each copy numbers what it reads."""

    def __init__(self) -> None:
        self.read = 0

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return index, self.read

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


class Positioned(data.IterableDataset[int]):
    """Says where it stands, and goes on from there at the next pass."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        info = data.get_worker_info()
        share, shares = (info.id, info.num_workers) if info else (0, 1)
        while self.at < 20:
            self.at += 1
            if (self.at - 1) % shares == share:
                yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("place", [*PLACES, {"num_workers": 2, "workers": "thread"}])
@pytest.mark.parametrize("kind", [Squares, Counts, Positioned])
def test_a_state_of_before_the_first_pass_has_a_whole_epoch(kind: Any, place: Any) -> None:
    def make() -> pg.DataLoader:
        return pg.DataLoader(kind(), 3, collate_fn=list, **place)

    def delivered(loader: pg.DataLoader) -> list[Any]:
        rows = flat(loader)
        # A batch is read by whichever thread is free, so how many its copy had read before is left to chance.
        return [row[0] for row in rows] if kind is Counts and place.get("workers") == "thread" else rows

    loader = make()
    state = json.loads(json.dumps(loader.state_dict()))
    whole = delivered(loader)
    rows = sorted(row[0] if isinstance(row, tuple) else row for row in whole)
    assert rows == list(range(20))
    again = make()
    again.load_state_dict(state)
    assert delivered(again) == whole
    if place["num_workers"] == 0 and kind is not Squares:
        return  # the dataset is the caller's own object, which has moved on with the pass
    stopped = make()
    state = stopped.state_dict()
    next(iter(stopped))
    stopped.load_state_dict(state)  # the loader's own, after a part of a pass
    assert delivered(stopped) == whole


@pytest.mark.parametrize("place", PLACES)
def test_a_state_before_the_first_batch_is_of_the_same_pass(place: Any) -> None:
    loader = pg.DataLoader(Squares(), 4, shuffle=True, **place)
    passing = iter(loader)
    state = loader.state_dict()
    whole = flat(passing)
    for _ in range(2):
        loader.load_state_dict(state)
        assert flat(loader) == whole


class Stepping(data.Sampler[int]):
    """Goes on where it stood, and says so."""

    def __init__(self) -> None:
        self.next = 0
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < 20:
            self.next += 1
            yield (self.next - 1) * 7 % 20 + 100 * self.epoch
        self.next = 0
        self.epoch += 1

    def __len__(self) -> int:
        return 20

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next, self.epoch = state["next"], state["epoch"]


class Anything(Squares):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("place", PLACES)
def test_a_sampler_with_a_state_is_put_back(place: Any) -> None:
    loader = pg.DataLoader(Anything(), 3, sampler=Stepping(), **place)
    flat(loader)  # epoch 0
    passing = iter(loader)
    seen = next(passing).tolist()
    state = loader.state_dict()
    rest = flat(passing)
    again = pg.DataLoader(Anything(), 3, sampler=Stepping(), **place)
    again.load_state_dict(state)
    assert flat(again) == rest and seen[0] == 100
    again.load_state_dict(state)  # also in a loader whose sampler has gone on
    assert flat(again) == rest


class OfAnEpoch(data.IterableDataset[int]):
    """As Hugging Face's: a state is taken up in its own epoch only."""

    def __init__(self) -> None:
        self.epoch = 0
        self.start = (0, 0)
        self.at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.at = self.start[1] if self.start[0] == self.epoch else 0
        while self.at < 12:
            self.at += 1
            yield self.at - 1 + 100 * self.epoch
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["epoch"], state["at"]


@pytest.mark.parametrize("place", [{"num_workers": 0}, {"num_workers": 1}])
def test_a_stream_with_epochs_resumes_in_a_later_one(place: Any) -> None:
    loader = pg.DataLoader(OfAnEpoch(), 3, **place)
    loader.set_epoch(4)
    passing = iter(loader)
    assert next(passing).tolist() == [400, 401, 402]
    state = loader.state_dict()
    again = pg.DataLoader(OfAnEpoch(), 3, **place)
    again.load_state_dict(state)
    assert flat(again) == list(range(403, 412))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("taken", [None, 0, 2, 7, 8])
@pytest.mark.parametrize("kind", [Squares, Counts, Positioned, Anything])
def test_a_distributed_checkpoint_holds_a_state(kind: Any, taken: int | None, tmp_path: Any) -> None:
    import torch.distributed.checkpoint as dcp

    def make() -> pg.DataLoader:
        options: dict[str, Any] = {"sampler": Stepping()} if kind is Anything else {}
        if kind is Squares:
            options = {"shuffle": True, "generator": torch.Generator().manual_seed(1)}
        return pg.DataLoader(kind(), 3, collate_fn=list, **options)

    loader, fresh = make(), make()
    if kind is Counts and taken == 8:
        return  # between epochs a dataset in the training process is the caller's own object
    if taken is not None:
        for _ in zip(range(taken), passing := iter(loader), strict=False):
            pass
    dcp.save({"loader": loader}, checkpoint_id=tmp_path)
    rest = flat(loader if taken in (None, 8) else passing)
    dcp.load({"loader": fresh}, checkpoint_id=tmp_path)
    assert flat(fresh) == rest


class Plain(data.IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        info = data.get_worker_info()
        return iter(range(self.count)[info.id :: info.num_workers] if info else range(self.count))


@pytest.mark.parametrize(("dataset", "taken"), [(Squares(), 1), (Plain(20), 5)], ids=["map", "iterable"])
def test_workers_begin_the_epoch_after_a_resumed_one_anew(dataset: Any, taken: int) -> None:
    loader, again = (pg.DataLoader(dataset, 4, **PLACES[2]) for _ in range(2))
    for _ in zip(range(taken), passing := iter(loader), strict=False):
        state = loader.state_dict()
    again.load_state_dict(state)
    assert [flat(again), flat(again)] == [flat(passing), flat(loader)]


INTERRUPTED = [
    {"num_workers": 0},
    {"num_workers": 2},
    {"num_workers": 2, "workers": "thread"},
    {"num_workers": 1, "in_order": False},
]


@pytest.mark.parametrize("place", INTERRUPTED, ids=str)
@pytest.mark.parametrize("kind", ["dataset", "stateful", "stream"])
def test_a_batch_that_ctrl_c_kept_from_the_loop_counts_as_not_delivered(
    kind: str, place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when torch's iterator has the batch and has not returned it yet."""

    def made() -> Any:
        rows: Any = {"dataset": list(range(20)), "stateful": Counts(), "stream": Plain(20)}[kind]
        return pg.DataLoader(rows, 2, **place)

    leave = torch.autograd.profiler.record_function.__exit__

    def interrupted(*args: Any) -> None:
        leave(*args)
        monkeypatch.undo()
        raise KeyboardInterrupt

    batches = iter(loader := made())
    came = [next(batches) for _ in range(3)]
    with monkeypatch.context() as patched:
        patched.setattr(torch.autograd.profiler.record_function, "__exit__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    state = loader.state_dict()
    (resumed := made()).load_state_dict(state)
    rest = samples(resumed)
    assert samples(came) | rest == set(range(20))
    assert not samples(came) & rest
    assert samples(batches) == rest  # the pass may also go on


def samples(batches: Any) -> set[int]:
    """Of the batches, without what the workers count."""
    rows = (batch[0] if isinstance(batch, list) else batch for batch in batches)
    return {number for row in rows for number in row.tolist()}


class Draws(data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(8):
            yield torch.rand(2)


def test_an_iterables_random_numbers_in_threads_are_the_same_behind_a_resume() -> None:
    def made() -> pg.DataLoader:
        torch.manual_seed(3)
        return pg.DataLoader(Draws(), 2, num_workers=1, workers="thread")

    loader = made()
    passing = iter(loader)
    next(passing)
    state, rest = loader.state_dict(), flat(passing)
    again = made()
    again.load_state_dict(state)
    assert flat(again) == rest


class Seeds(Squares):
    def __getitem__(self, index: int) -> int:
        return torch.initial_seed()


def test_a_rank_that_loads_the_state_of_another_has_workers_with_seeds_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = pg.DataLoader(Seeds(), 2, num_workers=1)
    passing = iter(loader)
    seeds, state = {*next(passing).tolist()}, loader.state_dict()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    other = pg.DataLoader(Seeds(), 2, num_workers=1)
    other.load_state_dict(state)
    assert seeds.isdisjoint(flat(other))
