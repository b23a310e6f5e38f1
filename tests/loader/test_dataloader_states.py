"""States of a ``pg.DataLoader`` where they are taken: inside a pass, at its ends, in workers with states of their own."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils import data

import pipegraph as pg
from pipegraph.errors import StateError
from pipegraph.loader.torch_dataloader.batch_progress import Remaining

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


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("done", [1, 3, 6])
def test_a_map_style_data_set_with_a_state_goes_on_in_each_worker(place: Any, done: int) -> None:
    def make() -> pg.DataLoader:
        return pg.DataLoader(Counts(), 3, collate_fn=list, **place)

    loader = make()
    passing = iter(loader)
    for _ in range(done):
        next(passing)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = list(passing)
    again = make()
    again.load_state_dict(state)
    assert json.loads(json.dumps(again.state_dict())) == state
    assert list(again) == rest
    with pytest.raises(StateError, match=f"resume with num_workers={max(1, place['num_workers'])}"):
        pg.DataLoader(Counts(), 3, num_workers=3).load_state_dict(state)


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


def test_a_state_of_before_the_first_pass_asks_no_data_set() -> None:
    asked = Positioned()
    asked.at = 20  # as another loader's pass may have left it
    before = pg.DataLoader(asked, 3, num_workers=2).state_dict()
    assert before["rank0"][0]["copies"] == [[0, None], [0, None]]
    again = pg.DataLoader(Positioned(), 3, collate_fn=list, num_workers=2)
    again.load_state_dict(before)
    assert sorted(flat(again)) == list(range(20))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seeded", [False, True])
def test_a_state_between_two_epochs_has_the_order_of_the_next(place: Any, seeded: bool) -> None:
    def make() -> pg.DataLoader:
        generator = torch.Generator().manual_seed(5) if seeded else None
        return pg.DataLoader(Squares(), 4, shuffle=True, generator=generator, **place)

    torch.manual_seed(0)
    loader = make()
    first = flat(loader)
    state = loader.state_dict()
    second = flat(loader)
    assert first != second
    torch.manual_seed(0)  # as scripts do at their start
    again = make()
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert flat(again) == second
    assert flat(again) != second


def test_a_generator_seeded_behind_the_load_is_what_is_wanted() -> None:
    loader = pg.DataLoader(Squares(), shuffle=True)
    flat(loader)
    state = loader.state_dict()

    def epoch(loaded: bool) -> list[int]:
        again = pg.DataLoader(Squares(), shuffle=True)
        if loaded:
            again.load_state_dict(state)
        torch.manual_seed(33)
        return flat(again)

    assert epoch(loaded=True) == epoch(loaded=False)


@pytest.mark.parametrize("place", PLACES)
def test_a_state_before_the_first_batch_is_of_the_same_pass(place: Any) -> None:
    loader = pg.DataLoader(Squares(), 4, shuffle=True, **place)
    passing = iter(loader)
    state = loader.state_dict()
    whole = flat(passing)
    for _ in range(2):
        loader.load_state_dict(state)
        assert flat(loader) == whole


def test_the_epoch_after_a_resumed_one_has_another_order_in_a_script_that_seeds_itself() -> None:
    def start() -> pg.DataLoader:
        torch.manual_seed(0)
        return pg.DataLoader(Squares(), 5, shuffle=True)

    whole = start()
    epochs = [flat(whole), flat(whole)]
    stopped = start()
    passing = iter(stopped)
    seen = next(passing).tolist()
    state = stopped.state_dict()
    again = start()
    again.load_state_dict(state)
    assert [seen + flat(again), flat(again)] == epochs


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


def test_a_network_s_weights_are_no_state_of_a_data_set() -> None:
    class Encoded(torch.nn.Linear, Squares):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(2, 2)

    loader = pg.DataLoader(Encoded(), 4)
    next(iter(loader))
    assert loader.state_dict()["rank0"][0]["copies"] == []


class Noisy(Squares):
    """Its state is that of torch's global generator, which a sampler may draw from too."""

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(()))

    def state_dict(self) -> dict[str, Any]:
        return {"generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["generator"])


class NoisyStream(data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return Noise()


class Noise(Noisy):
    at = 0

    def __iter__(self) -> Noise:
        return self

    def __next__(self) -> Any:
        if self.at == 20:
            raise StopIteration
        self.at += 1
        return self[self.at]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.at = state["at"]


@pytest.mark.parametrize("done", [0, 2])
@pytest.mark.parametrize(
    ("made", "options"),
    [(Noisy, {}), (Noisy, {"shuffle": True}), (Noisy, {"sampler": [3, 1, 7, 5, 2, 4, 6]}), (NoisyStream, {})],
)
def test_a_data_set_that_keeps_the_global_generator_draws_the_same_in_the_training_process(
    made: Any, options: Any, done: int
) -> None:
    first = pg.DataLoader(made(), 3, collate_fn=list, **options)
    passing = iter(first)
    for _ in range(done):
        next(passing)
    state = first.state_dict()
    rest = flat(passing)
    torch.rand(5)
    second = pg.DataLoader(made(), 3, collate_fn=list, **options)
    second.load_state_dict(state)
    assert flat(second) == rest


@pytest.mark.parametrize(
    "place", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2, "workers": "thread"}]
)
def test_a_script_that_saves_the_next_epoch_s_number_gets_the_rest_of_this_one(place: Any) -> None:
    def make() -> tuple[Any, pg.DataLoader]:
        sampler: Any = data.DistributedSampler(Squares(), 2, 0, seed=3)
        return sampler, pg.DataLoader(Squares(), 3, sampler=sampler, **place)

    sampler, loader = make()
    sampler.set_epoch(1)
    passing = iter(loader)
    next(passing)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = flat(passing)

    sampler, again = make()
    sampler.set_epoch(2)
    again.load_state_dict(state)
    with pytest.warns(
        UserWarning, match="middle of epoch 1 and its sampler was set to epoch 2: the rest of epoch 1"
    ):
        assert flat(again) == rest
    sampler.set_epoch(2)  # the next pass is the script's own again
    assert flat(again) == list(sampler)


class Counted(data.DistributedSampler[int]):
    """As torchdata's ``StatefulDistributedSampler``: its state is how much it has given, of the epoch before too."""

    def __init__(self) -> None:
        super().__init__(range(10), 1, 0)
        self.given = 0
        self._resumes_at: int | None = None

    def __iter__(self) -> Iterator[int]:
        self.given, self._resumes_at = self._resumes_at or 0, None
        for index in islice(super().__iter__(), self.given, None):
            self.given += 1
            yield index

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._resumes_at = state["given"]


@pytest.mark.parametrize("before", [0, 2, 4])
@pytest.mark.parametrize("done", [1, 3, 5])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_counts_resumes_behind_a_whole_or_a_broken_epoch(
    workers: int, done: int, before: int
) -> None:
    def make() -> pg.DataLoader:
        return pg.DataLoader(range(10), 3, sampler=Counted(), num_workers=workers)

    def taken(loader: pg.DataLoader, epoch: int, steps: int) -> list[list[int]]:
        loader.set_epoch(epoch)
        passing = iter(loader)
        return [each.tolist() for each in islice(passing, steps)]

    first = make()
    if before:
        taken(first, 0, before)
    first.set_epoch(1)
    passing = iter(first)
    delivered = [each.tolist() for each in islice(passing, done)]
    state = json.loads(json.dumps(first.state_dict()))
    rest = [each.tolist() for each in passing]
    second = make()
    second.load_state_dict(state)
    whole = done == 5  # the loop has ended, and the next epoch follows
    assert taken(second, 1, 9) == (delivered if whole else rest)


def test_a_sampler_that_cannot_be_put_back_is_named() -> None:
    class Drifts(Counted):
        drawn = 0

        def __iter__(self) -> Iterator[int]:
            Drifts.drawn += 1
            return iter([Drifts.drawn, 0, 1, 2])

    loader = pg.DataLoader(range(10), 2, sampler=Drifts())
    next(iter(loader))
    state = loader.state_dict()
    Drifts.drawn = 5
    loader.load_state_dict(state)
    with pytest.raises(
        pg.errors.StateError, match=r"Drifts, begins with \[7, 0\] where the state has \[1, 0\]"
    ):
        next(iter(loader))


@pytest.mark.parametrize("place", PLACES[:2])
@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({"batch_size": 4}, {"batch_size": 5}, "batch_size=4 and this loader has batch_size=5"),
        ({"batch_size": 4}, {"batch_size": None}, "batch_size=4 and this loader has batch_size=None"),
        ({"shuffle": True}, {"shuffle": False}, "shuffle=True and this loader has shuffle=False"),
    ],
)
@pytest.mark.parametrize("kind", [Squares, Counts])
def test_a_state_of_the_middle_of_an_epoch_is_for_the_same_batches(
    kind: Any, before: Any, after: Any, named: str, place: Any
) -> None:
    loader = pg.DataLoader(kind(), **before, **place)
    passing = iter(loader)
    next(passing)
    state = json.loads(json.dumps(loader.state_dict()))
    other = pg.DataLoader(kind(), **after, **place)
    with pytest.raises(StateError, match=named):
        other.load_state_dict(state)
    assert sum(1 for _ in passing) == len(loader) - 1
    other.load_state_dict(loader.state_dict())  # between epochs they may change
    assert sum(1 for _ in other) == len(other)


@pytest.mark.parametrize("place", PLACES[:2])
def test_a_state_of_the_middle_of_a_shuffled_epoch_is_for_a_dataset_of_the_same_length(place: Any) -> None:
    rows = list(range(23))
    loader = pg.DataLoader(rows, 4, shuffle=True, **place)
    rows += range(23, 25)  # read with the first pass: the order is drawn then
    passing = iter(loader)
    next(passing)
    state = json.loads(json.dumps(loader.state_dict()))
    other = pg.DataLoader([*rows, 25], 4, shuffle=True, **place)
    with pytest.raises(StateError, match="samples=25 and this loader has samples=26"):
        other.load_state_dict(state)
    assert sum(1 for _ in passing) == 6
    other.load_state_dict(loader.state_dict())  # between epochs it may change
    assert sorted(torch.cat(list(other)).tolist()) == [*range(26)]
    grown = pg.DataLoader([*rows, 25], 4, **place)  # in sequence, what was added is read too
    before = pg.DataLoader(rows, 4, **place)
    next(iter(before))
    grown.load_state_dict(before.state_dict())
    assert torch.cat(list(grown)).tolist() == [*range(4, 26)]


@pytest.mark.parametrize("place", PLACES[:2])
@pytest.mark.parametrize("with_generator", [True, False])
def test_a_state_of_the_middle_of_an_epoch_is_for_an_order_from_the_same_source(
    with_generator: bool, place: Any
) -> None:
    def make(seeded: bool) -> Any:
        generator = torch.Generator().manual_seed(3) if seeded else None
        return pg.DataLoader(Squares(), 3, shuffle=True, generator=generator, **place)

    loader = make(with_generator)
    passing = iter(loader)
    next(passing)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [batch.tolist() for batch in passing]
    words = ["a generator=", "torch's global generator"]
    before, now = words if with_generator else words[::-1]
    other = make(not with_generator)
    other.load_state_dict(state)
    with pytest.raises(StateError, match=f"drawn from {before}, and this loader's would be drawn from {now}"):
        list(other)
    same = make(with_generator)
    same.load_state_dict(state)
    assert [batch.tolist() for batch in same] == rest
    other.load_state_dict(loader.state_dict())  # between epochs it may change
    assert sorted(flat(other)) == [*range(20)]


class Held(Squares):
    """Index 0 waits until others have been delivered; every worker's copy shares the gate by its path."""

    def __init__(self, gate: str, lock: Any = None) -> None:
        self.gate, self.lock = gate, lock

    def __getitem__(self, index: int) -> int:
        if index == 0 and self.gate:
            with open(self.gate):  # blocks until it is opened for writing
                pass
        return index


@pytest.mark.parametrize("kind", ["processes", "threads", "torch's"])
@pytest.mark.parametrize("back", [False, True])
def test_a_state_out_of_order_has_what_was_delivered(kind: str, back: bool, tmp_path: Any) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    lock = threading.Lock() if kind == "torch's" else None  # which cannot be sent
    options: dict[str, Any] = {"num_workers": 2, "workers": "thread" if kind == "threads" else "process"}
    loader = pg.DataLoader(Held(gate, lock), 3, in_order=False, **options)
    passing = iter(loader)
    found = [next(passing).tolist() for _ in range(2)]
    state = json.loads(json.dumps(loader.state_dict()))
    with open(gate, "w"):
        rest = [batch.tolist() for batch in passing]
    assert found == ([[3, 4, 5], [9, 10, 11]] if lock else [[3, 4, 5], [6, 7, 8]])
    again = pg.DataLoader(Held("", lock), 3, in_order=back, **options)
    again.load_state_dict(state)
    assert json.loads(json.dumps(again.state_dict())) == state
    resumed = iter(again)
    batches = [next(resumed).tolist()]
    state = again.state_dict()  # inside the resumed pass
    batches += [batch.tolist() for batch in resumed]
    assert sorted(batches) == sorted(rest)
    if back:
        assert batches == sorted(rest)
    second = pg.DataLoader(Held("", lock), 3, num_workers=0)
    second.load_state_dict(state)
    assert sorted(flat(second) + batches[0]) == [row for batch in sorted(rest) for row in batch]


def test_numbers_of_the_batches_that_remain() -> None:
    left = Remaining()
    for number in (1, 4, 0, 3):
        left = left.without(number)
    assert left == Remaining(2, frozenset({3, 4}))
    assert [left.number(step) for step in range(4)] == [2, 5, 6, 7]
    assert list(left.of(iter("cdefg"))) == ["c", "f", "g"]


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


def test_a_state_of_the_middle_is_for_as_many_ranks() -> None:
    def make(ranks: int) -> pg.DataLoader:
        return pg.DataLoader(Squares(), 2, sampler=data.DistributedSampler(Squares(), ranks, 0))

    loader = make(2)
    next(iter(loader))
    with pytest.raises(StateError, match="num_replicas=2 and this loader has num_replicas=1"):
        make(1).load_state_dict(loader.state_dict())


def distributed(seed: int, shuffle: bool = True) -> Any:
    return data.DistributedSampler(Squares(), 2, 0, shuffle=shuffle, seed=seed)


def test_a_state_of_the_middle_is_for_the_same_seed_of_a_distributed_sampler() -> None:
    loader = pg.DataLoader(Squares(), 2, sampler=distributed(3))
    between = loader.state_dict()
    next(iter(loader))
    again = pg.DataLoader(Squares(), 2, sampler=distributed(4))
    with pytest.raises(
        StateError, match=r"sampler\.seed=3 and this loader has sampler\.seed=4.*resume with sampler"
    ):
        again.load_state_dict(loader.state_dict())
    again.load_state_dict(between)
    in_turn = pg.DataLoader(Squares(), 2, sampler=distributed(3, shuffle=False))
    next(passing := iter(in_turn))
    unshuffled = pg.DataLoader(Squares(), 2, sampler=distributed(4, shuffle=False))
    unshuffled.load_state_dict(in_turn.state_dict())
    assert flat(unshuffled) == flat(passing)


def test_a_graphs_state_is_for_the_same_seed_of_a_distributed_sampler() -> None:
    def graph(seed: int) -> pg.Graph:
        made = pg.Graph("sampled")
        made.add(pg.operators.FromSequence(range(20), sampler=distributed(seed)), name="rows")
        return made

    with graph(3).loader() as loader:
        next(iter(loader))
        state = loader.state_dict()
    with (
        graph(4).loader() as loader,
        pytest.raises(StateError, match="'rows'.*here it has a sampler with seed=4"),
    ):
        loader.load_state_dict(state)


class SplitByRank(data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(int(os.environ["RANK"]), 24, int(os.environ["WORLD_SIZE"])))


def become(rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


def test_a_stream_that_splits_itself_resumes_its_epoch_with_as_many_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    become(1, 2, monkeypatch)
    loader = pg.DataLoader(SplitByRank(), 2, collate_fn=list)
    between = loader.state_dict()
    next(passing := iter(loader))
    state = loader.state_dict()
    again = pg.DataLoader(SplitByRank(), 2, collate_fn=list)
    again.load_state_dict(state)
    assert flat(again) == flat(passing)
    become(0, 1, monkeypatch)
    again = pg.DataLoader(SplitByRank(), 2, collate_fn=list)
    with pytest.raises(StateError, match="ranks=2 and this loader has ranks=1.*resume with ranks=2"):
        again.load_state_dict(state)
    again.load_state_dict(between)
    assert flat(again) == list(range(24))


@pytest.mark.parametrize("kind", ["stream", "sampler"])
def test_a_graph_whose_source_splits_itself_resumes_its_epoch_with_as_many_ranks(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def graph(rank: int, world_size: int) -> pg.Graph:
        become(rank, world_size, monkeypatch)
        made, ops = pg.Graph("split"), pg.operators
        sampler = data.DistributedSampler(range(24), world_size, rank)  # type: ignore[arg-type]
        source = (
            ops.FromIterable(SplitByRank(), shard=False)
            if kind == "stream"
            else ops.FromSequence(range(24), sampler=sampler)
        )
        made.add(source, name="rows")
        return made

    states = []
    for rank in range(2):
        with graph(rank, 2).loader(equal_steps=False) as loader:
            next(iter(loader))
            states.append(loader.state_dict())
    for given in (states, states[0]):
        with (
            graph(0, 1).loader() as loader,
            pytest.raises(StateError, match="'rows' reads may be split.* with 2"),
        ):
            loader.load_state_dict(given)


def test_each_rank_has_its_own_part_of_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    states: dict[str, Any] = {}
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        loader = pg.DataLoader(Counts(), 3, collate_fn=list)
        for _ in zip(range(rank + 1), iter(loader), strict=False):
            pass
        states |= loader.state_dict()
    loader.load_state_dict(states)
    assert loader.state_dict()["rank1"][0]["batches"] == 2
    del states["rank1"]
    with pytest.warns(pg.errors.PipegraphWarning, match="no part of rank 1, only of rank0"):
        loader.load_state_dict(states)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_script_that_seeds_itself_repeats_no_order_after_a_resume_within_an_epoch(workers, batches):
    def begun(state=None):
        torch.manual_seed(3)
        loader = pg.DataLoader(range(12), batch_size=4, shuffle=True, num_workers=workers, workers="thread")
        if state is not None:
            loader.load_state_dict(state)
        return loader

    def orders(loader, epochs):
        return [[batch.tolist() for batch in loader] for _ in range(epochs)]

    whole = orders(begun(), 4)
    loader = begun()
    for _ in range(2):
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator)
        state = loader.state_dict()
        del iterator
    resumed = orders(begun(state), 3)
    assert resumed == [whole[1][batches:], *whole[2:]]


class Unsized(torch.utils.data.Dataset):
    """Its length is not known."""

    def __len__(self):
        raise NotImplementedError

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: torch.utils.data.DistributedSampler(range(8), 2, 0),
        lambda: torch.utils.data.RandomSampler(range(8), generator=torch.Generator().manual_seed(0)),
    ],
    ids=["distributed", "random"],
)
def test_the_length_that_counts_is_of_what_the_sampler_shuffles(sampler):
    def loader():
        return pg.DataLoader(Unsized(), batch_size=None, sampler=sampler())

    with_state = loader()
    passing = iter(with_state)
    first, state = next(passing), with_state.state_dict()
    again = loader()
    again.load_state_dict(state)
    assert [first, *again] == list(sampler())


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", ["dataset", "sampler", "stream", "inherited stream"])
def test_a_dataset_that_has_become_shorter_than_what_was_delivered_is_named(kind: str, workers: int) -> None:
    """Else the rest of the epoch would be empty, and the training loop go on with the next."""

    def made(count: int) -> Any:
        if kind == "dataset":
            return pg.DataLoader(list(range(count)), 2, num_workers=workers)
        if kind == "sampler":
            return pg.DataLoader(list(range(40)), 2, sampler=list(range(count)), num_workers=workers)
        stream = Plain(
            count, torch.multiprocessing.Lock() if kind == "inherited stream" and workers else None
        )
        return pg.DataLoader(stream, 2, num_workers=workers)

    batches = iter(loader := made(20))
    for _ in range(4):
        next(batches)
    state = loader.state_dict()
    (rest := made(20)).load_state_dict(state)
    assert len(list(rest)) == len(list(batches))
    (short := made(1)).load_state_dict(state)
    with pytest.raises(
        StateError, match="of this epoch were delivered before the state was taken, and now there"
    ):
        list(short)


class Plain(data.IterableDataset[int]):
    def __init__(self, count: int, inherited: Any) -> None:
        self.count, self.inherited = count, inherited

    def __iter__(self) -> Iterator[int]:
        info = data.get_worker_info()
        return iter(range(self.count)[info.id :: info.num_workers] if info else range(self.count))


INTERRUPTED = [
    {"num_workers": 0},
    {"num_workers": 2},
    {"num_workers": 2, "workers": "thread"},
    {"num_workers": 1, "in_order": False},
]


@pytest.mark.parametrize("place", INTERRUPTED, ids=str)
@pytest.mark.parametrize("kind", ["dataset", "stateful", "inherited", "stream"])
def test_a_batch_that_ctrl_c_kept_from_the_loop_counts_as_not_delivered(
    kind: str, place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when torch's iterator has the batch and has not returned it yet."""

    def made() -> Any:
        rows: Any = {"dataset": list(range(20)), "stateful": Counts(), "stream": Plain(20, None)}.get(kind)
        return pg.DataLoader(Locked() if rows is None else rows, 2, **place)

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


class Locked(Squares):
    """Cannot be sent to another process."""

    def __init__(self) -> None:
        self.lock = torch.multiprocessing.Lock()


class Draws(data.Dataset[int]):
    """A map-style dataset that draws from a generator of its own, seeded otherwise in each program."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1 << 30, (), generator=self.generator))

    def state_dict(self) -> Any:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Any) -> None:
        self.generator.set_state(state["generator"])


@pytest.mark.parametrize("epochs", [0, 1])
def test_between_epochs_the_state_of_a_dataset_without_copies_is_saved(epochs: int) -> None:
    first = pg.DataLoader(Draws(1), 2)
    for _ in range(epochs):
        list(first)
    state = first.state_dict()
    following = [[batch.tolist() for batch in first] for _ in range(2)]
    second = pg.DataLoader(Draws(2), 2)
    second.load_state_dict(state)
    assert [[batch.tolist() for batch in second] for _ in range(2)] == following


class IteratedOften(data.IterableDataset[int]):
    """Counts how often it is iterated; the iterators have a state."""

    def __init__(self) -> None:
        self.epoch = -1

    def __iter__(self) -> Any:
        self.epoch += 1
        return OneIteration(self.epoch)


class OneIteration:
    def __init__(self, epoch: int) -> None:
        self.epoch, self.at = epoch, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if self.at == 6:
            raise StopIteration
        self.at += 1
        return self.epoch * 10 + self.at

    def state_dict(self) -> Any:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


def test_a_resumed_pass_iterates_its_dataset_once() -> None:
    first = pg.DataLoader(IteratedOften(), 2)
    passing = iter(first)
    next(passing)
    state = first.state_dict()
    rest = [[batch.tolist() for batch in each] for each in (passing, first)]
    second = pg.DataLoader(IteratedOften(), 2)
    second.load_state_dict(state)
    assert [[batch.tolist() for batch in second] for _ in range(2)] == rest
