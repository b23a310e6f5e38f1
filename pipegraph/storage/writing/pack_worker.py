"""A worker process of a pack: writes whole shards, one after the other."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from pipegraph.errors import LoaderClosedError
from pipegraph.storage.manifest import PartIndex

from .encoder import Sample
from .encoders import encoder_of
from .field_kinds import Kinds
from .pack_sources import PackSource
from .shard_file import write_shard

Int64Array = npt.NDArray[np.int64]

_PR_SET_PDEATHSIG = 1
_CHECKED_EVERY = 64
"""Samples between two looks at whether the pack was stopped."""


@dataclass(frozen=True)
class Job:
    """What all workers need: the source, as bytes on its way to a process that was not forked, and ``lock_fd``, which
    only the parent may keep, since it holds the folder's lock.
    """

    source: PackSource | bytes
    format: str
    kinds: Kinds
    nbytes: int
    lock_fd: int | None

    def sealed(self) -> Job:
        """To be sent to a process."""
        return replace(self, source=cloudpickle.dumps(self.source), lock_fd=None)


_job: Job | None = None
_stop: Any = None


def begin_worker(job: Job, stop: Any, parent: int | None) -> None:
    """In each worker, before its first task."""
    global _job, _stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends the others
    # A parent that is killed must leave nobody who writes on.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
    if job.lock_fd is not None:
        os.close(job.lock_fd)
    if isinstance(job.source, bytes):
        job = replace(job, source=cloudpickle.loads(job.source))
    _job, _stop = job, stop


def shard_in_worker(path: str, numbers: Int64Array) -> PartIndex:
    """One shard, by the job that the worker began with."""
    assert _job is not None
    return write_part(_job, path, numbers, _stop)


def write_part(job: Job, path: str, numbers: Int64Array, stop: Any = None) -> PartIndex:
    """One shard of these samples."""
    source = job.source
    assert isinstance(source, PackSource)
    encoder = encoder_of(job.format)(job.kinds, job.nbytes)
    return write_shard(path, encoder, _samples(source, numbers, stop))


def _samples(source: PackSource, numbers: Int64Array, stop: Any) -> Iterator[tuple[int, Sample]]:
    read = source.read
    for place, number in enumerate(numbers.tolist()):
        if stop is not None and not place % _CHECKED_EVERY and stop.is_set():
            raise LoaderClosedError("pack: stopped")
        yield number, read(number)
