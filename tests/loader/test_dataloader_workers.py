"""What scripts expect of torch's workers: what they inherit, what they are called, how their deaths read."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import multiprocessing as mp
from torch.utils import data

import pipegraph as pg

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Holds(data.Dataset[int]):
    """Has something that only a fork of this process can have too."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    "thing",
    [threading.Lock, mp.get_context("fork").Lock],
    ids=["lock", "lock of processes"],
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


SHARED: dict[str, Any] = {
    "tensor": lambda folder: torch.zeros(1).share_memory_(),
    "RawArray": lambda folder: np.frombuffer(mp.RawArray("d", 1)),
    "mmap": lambda folder: np.frombuffer(mmap.mmap(-1, 8)),
    "memmap": lambda folder: np.memmap(folder / "x", "d", "w+", shape=(1,)),
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
    assert loader._inherits == (kind != "tensor")


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
