"""``pg.DataLoader`` beside torch's with the same random arguments: equal batches, lengths and errors over two epochs.

``PIPEGRAPH_CONFIGURATIONS=2000 pytest tests/loader/test_dataloader_beside_torch.py`` draws as many; one in seven has workers.
"""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data

import pipegraph as pg

COUNT = int(os.environ.get("PIPEGRAPH_CONFIGURATIONS", "150"))
PER_TEST = 15


class Numbers(data.Dataset[Any]):
    def __init__(self, n: int, kind: str) -> None:
        self.n, self.kind = n, kind
        self.calls = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.n:
            raise IndexError(index)
        self.calls += 1
        if self.kind == "fails" and index % 5 == 3:
            raise ValueError(f"no sample {index}")
        kinds = {
            "dict": lambda: {"x": torch.full((3,), float(index)), "name": f"n{index}", "y": index},
            "tuple": lambda: (np.arange(4) + index, index * 0.5, b"b"),
            "random": lambda: (torch.rand(2), np.random.rand(), random.random(), index),
            "large": lambda: torch.full((2000,), index),
            "ragged": lambda: torch.zeros(index % 3),
            "calls": lambda: (index, self.calls),
            "none": lambda: None,
        }
        return kinds.get(self.kind, lambda: index)()


class InGroups(Numbers):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


class Stream(data.IterableDataset[Any]):
    def __init__(self, n: int, kind: str) -> None:
        self.n, self.kind = n, kind

    def __iter__(self) -> Iterator[Any]:
        info = data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, self.n + (3 * first if self.kind == "uneven" else 0), step):
            if self.kind == "fails" and i == 7:
                raise ValueError("seven")
            yield (i, float(torch.rand(()))) if self.kind == "random" else i


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


def as_list(items: Any) -> Any:
    return list(items) if isinstance(items, list) else items


def with_noise(items: list[Any]) -> Any:
    return [len(items), torch.rand(2)]


def skip_numbers(worker: int) -> None:
    torch.rand(worker + 1)


def fails_at_start(worker: int) -> None:
    raise OSError("no disk")


def drawn(seed: int, workers: bool) -> tuple[Any, dict[str, Any], int]:
    """What makes the dataset, the loader's arguments, and after how many batches the first pass is left."""
    rng = random.Random(seed)
    pick = rng.choice
    n = pick([0, 1, 5, 12, 23])
    options: dict[str, Any] = {}
    if rng.random() < 0.9:
        options["batch_size"] = pick([1, 2, 3, 4, 7, None])
    if rng.random() < 0.3:
        options["drop_last"] = pick([True, False])
    if rng.random() < 0.25:
        options["collate_fn"] = pick([as_list, with_noise])
    if rng.random() < 0.5:
        options["generator"] = rng.randrange(1000)
    iterable = rng.random() < 0.25
    if iterable:
        kind = pick(["plain", "random", "fails", "uneven"])
        made: Any = pick([Stream, SizedStream])
        if rng.random() < 0.15:
            options["shuffle"] = pick([True, False])
        if rng.random() < 0.1:
            options["sampler"] = "list"
    else:
        kind = pick(["plain", "dict", "tuple", "random", "large", "ragged", "calls", "none", "fails"])
        made = pick([Numbers, Numbers, InGroups])
        way = rng.random()
        if way < 0.4:
            options["shuffle"] = True
        elif way < 0.6:
            options["sampler"] = pick(["random", "replaced", "weighted", "subset", "list", "unseeded"])
        elif way < 0.7:
            options["batch_sampler"] = pick(["batches", "lists"])
            options.pop("batch_size", None) if rng.random() < 0.8 else None
            options.pop("drop_last", None)
    if workers:
        options["num_workers"] = pick([1, 2, 2, 3])
        if rng.random() < 0.4:
            options["prefetch_factor"] = pick([1, 2, 4])
        if rng.random() < 0.4:
            options["persistent_workers"] = True
        if rng.random() < 0.3:
            options["worker_init_fn"] = pick(
                [
                    skip_numbers,
                    skip_numbers,
                    skip_numbers if "persistent_workers" in options else fails_at_start,
                ]
            )
        if rng.random() < 0.2:
            options["multiprocessing_context"] = pick(["fork", "nothing"])
    elif rng.random() < 0.1:
        options.update(
            pick([{"prefetch_factor": 2}, {"persistent_workers": True}, {"num_workers": -1}, {"timeout": -1}])
        )
    return (made, n, kind), options, pick([0, 0, 1, 3])


def arguments(n: int, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments anew: generators and samplers have a state."""
    made = dict(options)
    if "generator" in made:
        made["generator"] = torch.Generator().manual_seed(made["generator"])
    seeded = torch.Generator().manual_seed(3)
    samplers = {
        "random": lambda: data.RandomSampler(range(n), generator=seeded),
        "unseeded": lambda: data.SubsetRandomSampler(range(n)),
        "replaced": lambda: data.RandomSampler(range(n), True, 40, generator=seeded),
        "weighted": lambda: data.WeightedRandomSampler([1.0] * n, 9, generator=seeded),
        "subset": lambda: data.SubsetRandomSampler(range(n // 2), generator=seeded),
        "list": lambda: list(range(n))[::-1],
        "batches": lambda: data.BatchSampler(data.RandomSampler(range(n), generator=seeded), 3, False),
        "lists": lambda: [[i] for i in range(n)],
    }
    for name in ("sampler", "batch_sampler"):
        if name in made:
            made[name] = samplers[made[name]]()
    return made


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value).__name__, str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [plain(each) for each in value]
    return value


def error_of(error: BaseException) -> Any:
    return "error", type(error).__name__


def outcome(kind: Any, configuration: Any) -> list[Any]:
    (made, n, form), options, left_after = configuration
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    found: list[Any] = []
    try:
        loader = kind(made(n, form), **arguments(n, options))
    except Exception as error:
        return [error_of(error), str(error)]
    for name in (
        "batch_size",
        "drop_last",
        "num_workers",
        "prefetch_factor",
        "persistent_workers",
        "timeout",
    ):
        found.append((name, getattr(loader, name)))
    found.append(type(loader.sampler).__name__)
    for epoch in range(2):
        try:
            found.append(("length", len(loader)))
        except Exception as error:
            found.append(error_of(error))
        try:
            passing = iter(loader)
        except Exception as error:
            found.append((*error_of(error), str(error)))
            continue
        steps = 0
        # Behind a worker_init_fn that failed torch's workers raise errors of their own.
        errors = 3 if options.get("worker_init_fn") is fails_at_start else 0
        while errors < 4 and not (epoch == 0 and left_after and steps == left_after):
            steps += 1
            try:
                found.append(plain(next(passing)))
            except StopIteration:
                break
            except Exception as error:
                errors += 1
                found.append(error_of(error))
        del passing
    found.append(("afterwards", torch.rand(2).tolist(), float(np.random.rand()), random.random()))
    return found


@pytest.mark.parametrize("first", range(0, COUNT, PER_TEST))
def test_random_arguments_give_what_torchs_loader_gives(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch waits so long for each of its workers that has failed.
    monkeypatch.setattr(data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of more workers than cores
        for seed in range(first, first + PER_TEST):
            configuration = drawn(seed, workers=seed % 7 == 0)
            ours = outcome(pg.DataLoader, configuration)
            # Torch forks this process, and what a thread of ours holds as it ends would stay held in its workers.
            for thread in threading.enumerate():
                if thread.name.startswith("pipegraph-"):
                    thread.join(60)
            assert ours == outcome(data.DataLoader, configuration), (seed, configuration)
