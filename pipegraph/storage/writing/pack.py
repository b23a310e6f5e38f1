"""Packs a whole dataset into shards in parallel: resumable, and the same bytes for any number of workers.

First a plan, which follows from the source alone: which samples go to which shard. Then each shard is one task of one
worker process. A stopped run leaves whole shards; the next one indexes those and writes the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from pipegraph import concurrency
from pipegraph.errors import DataError, GraphError, LoaderClosedError, ShardError, WorkerDiedError, note
from pipegraph.integers import integer
from pipegraph.machine import cores
from pipegraph.order.permutation import key64, permute_one
from pipegraph.storage.manifest import Manifest, PartIndex
from pipegraph.units import parse_bytes

from .encoder import Sample
from .field_kinds import PROBES, Kinds, kinds_of
from .pack_folder import PackFolder, encoder_of
from .pack_sources import PackedStream, PackSource, source_of
from .shard_file import index_shard, write_shard
from .shard_writer import SIZE, ShardWriter
from .tar_encoder import MARKER_NBYTES

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackProgress:
    """How far `pack_shards` is.

    Args:
        shards_done, shards: of how many; None where only the end of the stream will tell.
        samples_done, samples: the same of samples.
        nbytes: of the shards done.
    """

    shards_done: int
    shards: int | None
    samples_done: int
    samples: int | None
    nbytes: int


Progress = Callable[[PackProgress], None]


def pack_shards(
    source: Any,
    target: str | os.PathLike[str],
    *,
    format: str = "tar",
    size: int | str = SIZE,
    workers: int | None = None,
    shuffle: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write a dataset as shards, with their manifest.

    The same call after a crash or an interrupt writes only what is missing, a stream all of it again; one on a complete
    folder changes nothing.

    Args:
        source: a folder of files, the folder or ``hf:NAME:SPLIT`` of a Hugging Face dataset, a dataset with
            ``__len__`` and ``__getitem__``, an iterable of dicts, or a function that returns one of these.
        target: the folder for the shards.
        format: one of those of docs/formats.md, ``"tar"`` or ``"parquet"``.
        size: about how large shards are, in bytes or such as ``"128 MB"``. Tars of files never exceed it, unless a
            single sample does; for others the number of samples follows from some all over the data.
        workers: processes; by default one per core. A stream is read and written by this one.
        shuffle: a seed: the samples are written in an order drawn from it, the same whatever the workers.
        progress: called in this thread after each shard.

    Raises:
        DataError: the source is empty, a sample has no place in the format, or the folder holds something else.
        GraphError: an argument is none.
        WorkerDiedError: a worker process was killed, or could not be started.
    """
    nbytes = parse_bytes(size, "pack: size")
    encoder_of(format)
    count = max(1, int(cores())) if workers is None else integer(workers, "pack: workers")
    if shuffle is not None:
        shuffle = integer(shuffle, "pack: shuffle", 0, "must be a seed, an int >= {}")
    found = source_of(source)
    if isinstance(found, PackedStream):
        if shuffle is not None:
            raise GraphError(
                "pack: a stream cannot be shuffled as it passes; write it to shards, then pack those with a shuffle"
            )
        return _pack_stream(found, target, format, nbytes, progress)
    if not len(found):
        raise DataError("pack: the source has no samples")
    settings = {"format": format, "size": nbytes, "source": found.describe(), "shuffle": shuffle}
    with PackFolder(target, settings) as goal:
        if goal.complete:
            return goal.manifest()
        try:
            return _pack_in_parallel(found, goal, nbytes, count, progress)
        except OSError as error:
            goal.note_if_full(error)
            raise


def _pack_stream(
    stream: PackedStream, target: Any, format: str, nbytes: int, progress: Progress | None
) -> Manifest:
    with ShardWriter(target, format, nbytes, source="stream") as writer:
        if not writer.complete:
            shards = writer.shards
            for sample in stream:
                writer.write(sample)
                if progress and writer.shards != shards:
                    shards = writer.shards
                    progress(PackProgress(shards, None, writer.written, None, shards * nbytes))
        return writer.close()


def _pack_in_parallel(
    source: PackSource, target: PackFolder, nbytes: int, workers: int, progress: Progress | None
) -> Manifest:
    format, seed = target.settings["format"], target.settings["shuffle"]
    kind = encoder_of(format)
    kinds: Kinds = {}
    if kind.has_columns:
        kinds = kinds_of((number, _read(source, number)) for number in _spread(len(source)))
    order = np.arange(len(source), dtype=np.int64)
    if seed is not None:
        order = permute_one(order, len(order), key64("pack", seed))
    parts = planned(source, order, format, kinds, nbytes)

    def report() -> None:
        if progress:
            done = target.finished.values()
            samples, size = sum(i.samples for i in done), sum(i.part.size or 0 for i in done)
            progress(PackProgress(len(done), len(parts), samples, len(source), size))

    job = Job(source, format, kinds, nbytes, target.lock_fd)
    tasks = [(number, target.path(number), part) for number, part in enumerate(parts)]
    for number, index in _results(job, tasks, min(workers, len(tasks)), report):
        target.finished[number] = index
        report()
    return target.finish(source.classes)


def _spread(count: int) -> list[int]:
    return sorted({int(place) for place in np.linspace(0, count - 1, min(count, PROBES))})


def planned(
    source: PackSource, order: Int64Array, format: str, kinds: Kinds, nbytes: int
) -> list[Int64Array]:
    """The numbers of the samples of each shard. Depends on the source, the order and the size alone."""
    sizes = source.nbytes
    if sizes is None:
        encoder = encoder_of(format)(kinds, nbytes)
        probes = [encoder.size(encoder.encode(_read(source, n), n)) for n in _spread(len(order))]
        shards = max(1, -(-sum(probes) * len(order) // (len(probes) * nbytes)))
        return np.array_split(order, min(shards, len(order)))
    ends = np.cumsum(sizes[order])
    room, cuts, start = nbytes - MARKER_NBYTES, list[int](), 0
    while True:
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + room, "right")), start + 1)
        if stop >= len(order):
            return np.split(order, cuts)
        cuts.append(stop)
        start = stop


def _results(
    job: Job, tasks: list[tuple[int, str, Int64Array]], workers: int, started: Callable[[], None]
) -> Iterator[tuple[int, PartIndex]]:
    """Finished shards as they come. After a failure no further one is begun."""
    if workers <= 1:
        started()
        for number, path, samples in tasks:
            yield number, write_part(job, path, samples)
        return
    # Forked workers start at once, with all that is imported here; a process that has other threads cannot fork safely.
    method = "fork" if concurrency.active_count() == 1 else "forkserver"
    context = multiprocessing.get_context(method)
    stop = context.Event()
    arguments = (job if method == "fork" else job.sealed(), stop, os.getpid() if method == "fork" else None)
    with ProcessPoolExecutor(workers, context, begin_worker, arguments) as pool:
        waiting = iter(tasks)
        pending: dict[Future[PartIndex], int] = {}

        def submit(count: int) -> None:
            for number, path, samples in islice(waiting, count):
                pending[pool.submit(shard_in_worker, path, samples)] = number

        try:
            submit(2 * workers)
            started()  # behind the fork: what it starts may have threads
            while pending:
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    yield pending.pop(future), future.result()
                    submit(1)
        except BrokenProcessPool as error:
            raise WorkerDiedError(
                "pack: a worker process ended by itself, killed for memory or at its start. The same call writes the "
                "rest. A program that has other threads must start its work under `if __name__ == '__main__':`, or "
                "pack with workers=1"
            ) from error
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


# -- in a worker process: whole shards, one after the other --------------------------------------------

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
    """One shard of these samples, unless an earlier run has finished it."""
    with contextlib.suppress(FileNotFoundError, ShardError):
        found = index_shard(path)
        if found.samples == len(numbers):
            return found
    source = job.source
    assert isinstance(source, PackSource)
    encoder = encoder_of(job.format)(job.kinds, job.nbytes)
    return write_shard(path, encoder, _samples(source, numbers, stop))


def _samples(source: PackSource, numbers: Int64Array, stop: Any) -> Iterator[tuple[int, Sample]]:
    for place, number in enumerate(numbers.tolist()):
        if stop is not None and not place % _CHECKED_EVERY and stop.is_set():
            raise LoaderClosedError("pack: stopped")
        yield number, _read(source, number)


def _read(source: PackSource, number: int) -> Sample:
    try:
        return source.read(number)
    except Exception as error:
        note(error, f"sample {number} of the source, which says that it has {len(source)}")
        raise
