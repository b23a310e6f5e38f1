"""Sets up a worker as torch's ``DataLoader`` does: seeds, ``get_worker_info``, ``worker_init_fn``."""

from __future__ import annotations

import copy
import os
import random
import signal
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils import collate as torch_collate, worker as _torch_worker

from pipegraph import global_generators, torch_modes
from pipegraph.device.slabs import SPARE_SLABS, SlabRing
from pipegraph.loader.loader import Loader

SHARED_BYTES = 1 << 12
"""Batched tensors of at least this many bytes are made in shared memory; smaller ones travel in the message."""


torch_worker: Any = _torch_worker  # typed in part only


@dataclass(frozen=True)
class DatasetWorker:
    """One worker of a data loader.

    Attributes:
        number: 0 .. workers-1.
        seed: of the loader's pass (torch's ``base_seed``).
        init: the user's ``worker_init_fn``.
    """

    number: int
    workers: int
    seed: int
    init: Callable[[int], None] | None


def become_worker(worker: DatasetWorker, dataset: Any, allocate: Callable[[int], torch.Tensor]) -> None:
    """Make this process that worker, as torch's ``_worker_loop`` does.

    ``dataset`` is this worker's copy; ``allocate`` gives shared memory that is sent without being copied.
    """
    global_generators.leave()  # its numbers are the worker's and not the sample's, as torch's are
    torch_modes.back()  # torch's workers have those of the loop that forked them
    torch.set_num_threads(1)
    seed = worker.seed + worker.number
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed notes a stack for each kind of device: 3 ms
    np.random.seed(torch_worker._generate_state(worker.seed, worker.number))
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker.number, num_workers=worker.workers, seed=seed, dataset=dataset
    )
    stacks = torch_collate.default_collate_fn_map
    stacks[torch.Tensor] = partial(_stack_shared, allocate, stacks[torch.Tensor], {})
    if worker.init is not None:
        worker.init(worker.number)


def _stack_shared(
    allocate: Callable[[int], torch.Tensor],
    otherwise: Callable[..., Any],
    rings: dict[int, SlabRing],
    batch: list[torch.Tensor],
    *,
    collate_fn_map: Any = None,
) -> torch.Tensor:
    """``default_collate`` of tensors, written once, to memory that the trainer reads."""
    first = batch[0]
    plain = first.__class__ is torch.Tensor and first.layout == torch.strided and first.device.type == "cpu"
    plain = plain and not first.is_nested  # its layout is strided too; torch's function refuses it
    nbytes = len(batch) * first.nbytes if plain else 0
    alike = nbytes >= SHARED_BYTES and all(
        each.shape == first.shape and each.dtype == first.dtype and not each.requires_grad for each in batch
    )
    if not alike:
        if plain and not any(each.requires_grad for each in batch):
            return torch.stack(batch, 0).contiguous()  # as the larger ones, and torch's
        made: torch.Tensor = otherwise(batch, collate_fn_map=collate_fn_map)
        return made
    room = 1 << (nbytes - 1).bit_length() if nbytes < 1 << 20 else -(-nbytes >> 20) << 20
    ring = rings.get(room)
    if ring is None:
        ring = rings[room] = SlabRing(allocate, SPARE_SLABS)
    lease = ring.lend(ring.take(room))
    out = lease.tensor(first.dtype, (len(batch), *first.shape))
    return torch.stack(batch, 0, out=out)


def own_copy(dataset: Any, made: dict[int, Any] | None = None) -> Any:
    """A copy of a dataset for a worker's thread: what it opens later is its own, the data in it is shared.

    Datasets within it (``Subset``, ``ConcatDataset``, ...) are copied alike, each once: they may know each other.
    ``made`` has the copies by the identity of what was copied.
    """
    if not isinstance(dataset, Dataset):
        return copy.copy(dataset) if hasattr(dataset, "__dict__") else dataset
    made = {} if made is None else made
    if id(dataset) not in made:
        mine = made[id(dataset)] = copy.copy(dataset)
        for name, value in list(vars(mine).items()):
            if isinstance(value, Dataset):
                mine.__dict__[name] = own_copy(value, made)
            elif (
                isinstance(value, list | tuple) and value and all(isinstance(each, Dataset) for each in value)
            ):
                mine.__dict__[name] = type(value)(own_copy(each, made) for each in value)
    return made[id(dataset)]


class WorkerProcess:
    """A worker's process, as scripts find it in ``_workers`` of torch's iterators. It keeps nothing alive."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._end: list[int] = []  # a descriptor that is readable from the process's end on
        with suppress(ProcessLookupError):  # it has ended already
            self._end.append(os.pidfd_open(pid))
            weakref.finalize(self, os.close, *self._end)

    @staticmethod
    def all_of(loader: Loader) -> list[WorkerProcess]:
        """Those of a running pipeline."""
        crew = loader._crew
        assert crew is not None
        operators = [worker.operator for workers in crew.workers.values() for worker in workers]
        return [WorkerProcess(pid) for each in operators if (pid := getattr(each, "pid", None)) is not None]

    def is_alive(self) -> bool:
        return wait(self._end, 0) != self._end

    @property
    def exitcode(self) -> int | None:
        """None while it runs, then 0: the loader raises the death of one that ended by itself."""
        return None if self.is_alive() else 0

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, or until the timeout in seconds."""
        if self._end:
            wait(self._end, timeout)

    def terminate(self) -> None:
        if self.is_alive():
            signal.pidfd_send_signal(self._end[0], signal.SIGTERM)
