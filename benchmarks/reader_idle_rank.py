"""One rank of reader_idle.py: one contestant's batches, a training step of fixed length, an all_reduce per step.

python benchmarks/reader_idle_rank.py JOB      (JSON; reader_idle.py starts it, with torchrun's variables)
python benchmarks/reader_idle_rank.py --get URL...     (objects to standard output)
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reader_idle_store import PARTS, SAMPLE_NBYTES, SAMPLES, options

# Other benchmarks lie beside this one, and must not hide packages of the same name.
sys.path[:] = [folder for folder in sys.path if folder != str(Path(__file__).parent)]

BATCH, RANKS, RATE = 32, 2, 20e6
"""``RATE``: bytes per second of each rank's line."""


@dataclass
class Job:
    """What one rank does.

    Attributes:
        name: of the contestant.
        port: this rank's way to the server.
        manifest: of the tar shards.
        near: a folder of this family of contestants and this round: empty for the first of them.
        seed: of the order.
        ratio: T_load / T_train.
        warm: blocks of each rank that are start-up.
    """

    name: str
    port: int
    manifest: str
    near: str
    seed: int
    ratio: float
    warm: int

    @property
    def rank(self) -> int:
        return int(os.environ["RANK"])

    def url(self, part: int) -> str:
        """Of a shard, without signing."""
        return f"http://127.0.0.1:{self.port}/data/part-{part:03}.tar"


# -- contestants -------------------------------------------------------------------------------------


def ideal(job: Job) -> Iterator[Any]:
    """Batches from memory."""
    import numpy as np

    batch = np.zeros((BATCH, SAMPLE_NBYTES), np.uint8)
    for _ in range(PARTS * SAMPLES // BATCH // RANKS):
        yield batch.copy()


def ideal_beside_a_download(job: Job) -> Iterator[Any]:
    """The same while another process of this rank downloads its shards: what the machine adds."""
    command = [sys.executable, __file__, "--get", *[job.url(part) for part in range(job.rank, PARTS, RANKS)]]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as download:
        yield from ideal(job)
        download.kill()


def ours(preload: bool, lanes: int | None = None, cached: bool = False) -> Callable[[Job], Iterator[Any]]:
    """pipegraph: part after part (``lanes=None``), or in lanes; through a node cache or not."""

    def stream(job: Job) -> Iterator[Any]:
        import pipegraph as pg
        from pipegraph import operators as ops

        order = pg.order.PartOrder() if lanes is None else pg.order.LaneOrder(lanes=lanes)
        graph = pg.Graph("idle", seed=job.seed)
        select = ops.ShardSelect(
            f"s3://data/part-{{000..{PARTS - 1:03}}}.tar",
            order=order,
            manifest=job.manifest,
            store=options(job.port),
        )
        cache = pg.NodeCache(job.near, "1 GB") if cached else None
        # Queues as by default, like the peers'; on demand short ones, since the theory knows of none.
        items, batches = (None, None) if preload else (8, 1)
        load = ops.Load(cache=cache, preload=preload)
        node = graph.add(select, capacity=items).then(load, capacity=items)
        node.then(ops.Batch(BATCH, collate=list), capacity=batches)
        with graph.loader() as loader:
            yield from loader
            if job.rank == 0 and os.environ.get("READER_IDLE_PROFILE"):
                print(loader.profile(), file=sys.stderr)

    return stream


def webdataset(cached: bool) -> Callable[[Job], Iterator[Any]]:
    """WebDataset over the same shards, streamed by HTTP, one DataLoader worker that prefetches as by default."""

    def stream(job: Job) -> Iterator[Any]:
        import webdataset as wds
        from torch.utils.data import DataLoader

        # curl is not on every machine, and moto wants some signature.
        urls = [
            f"pipe:{sys.executable} {os.path.abspath(__file__)} --get {job.url(part)}"
            for part in range(PARTS)
        ]
        random.Random(job.seed).shuffle(urls)
        near = {"cache_dir": job.near} if cached else {}
        if cached:
            Path(job.near).mkdir(parents=True, exist_ok=True)
        data = wds.WebDataset(
            urls[job.rank :: RANKS], shardshuffle=False, nodesplitter=as_it_is, empty_check=False, **near
        ).shuffle(100)
        yield from DataLoader(data.batched(BATCH, collation_fn=None), batch_size=None, num_workers=1)

    return stream


def as_it_is(urls: Iterable[str]) -> Iterable[str]:
    """For WebDataset: each rank has its own shards already."""
    return urls


def mosaic(job: Job) -> Iterator[Any]:
    """MosaicML Streaming over as many MDS shards of the same size; downloads ahead as by default."""
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    os.environ.update(
        S3_ENDPOINT_URL=f"http://127.0.0.1:{job.port}",
        AWS_ACCESS_KEY_ID="id",
        AWS_SECRET_ACCESS_KEY="secret",
        AWS_DEFAULT_REGION="us-east-1",
    )
    clean_stale_shared_memory()
    # Ranks of one node share this folder: the first of them brings the index.
    data = StreamingDataset(
        remote="s3://data/mds", local=job.near, batch_size=BATCH, shuffle=True, shuffle_seed=job.seed + 1
    )
    yield from DataLoader(data, batch_size=BATCH, num_workers=1)


CONTESTANTS: dict[str, Callable[[Job], Iterable[Any]]] = {
    "ideal": ideal,
    "ideal beside a download": ideal_beside_a_download,
    "parts+preload": ours(True),
    "parts on demand": ours(False),
    "lanes+preload": ours(True, lanes=12),
    "lanes on demand": ours(False, lanes=12),
    "pipegraph, cold cache": ours(True, cached=True),
    "pipegraph, warm cache": ours(True, cached=True),
    "webdataset": webdataset(cached=False),
    "webdataset, cold cache": webdataset(cached=True),
    "webdataset, warm cache": webdataset(cached=True),
    "mosaicml-streaming, cold cache": mosaic,
    "mosaicml-streaming, warm cache": mosaic,
}

# -- the rank ----------------------------------------------------------------------------------------


def train(job: Job) -> dict[str, float]:
    """What the slowest rank waited for in each step, once start-up is over: its share of the time, and its spread."""
    import torch
    import torch.distributed as dist

    steps_per_block = SAMPLES // BATCH
    step_s = SAMPLES * SAMPLE_NBYTES / RATE / job.ratio / steps_per_block
    first = job.warm * steps_per_block
    total = PARTS // RANKS * steps_per_block - steps_per_block
    began, waits, waited = 0.0, [], torch.zeros(1)
    dist.barrier()
    items = iter(CONTESTANTS[job.name](job))
    try:
        for step in range(total):
            asked = time.perf_counter()
            if step == first:
                began = asked
            next(items)
            waited[0] = time.perf_counter() - asked
            time.sleep(step_s)
            dist.all_reduce(waited, op=dist.ReduceOp.MAX)
            if step >= first:
                waits.append(float(waited[0]))
        took = time.perf_counter() - began
        ordered = sorted(waits)
        return {
            "idle": sum(waits) / took,
            "median_us": 1e6 * ordered[len(ordered) // 2],
            "p99_us": 1e6 * ordered[len(ordered) * 99 // 100],
            "most_us": 1e6 * ordered[-1],
        }
    finally:
        dist.barrier()  # nobody stops while the others still train
        if hasattr(items, "close"):
            items.close()


def main() -> None:
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    job = Job(**json.loads(sys.argv[1]))
    dist.init_process_group("gloo")
    found = train(job)
    if job.rank == 0:
        print("RESULT", json.dumps(found), flush=True)
    dist.destroy_process_group()


def get(urls: list[str]) -> None:
    """Objects to standard output."""
    from shutil import copyfileobj
    from urllib.request import Request, urlopen

    signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=id/20200101/us-east-1/s3/aws4_request"}
    for url in urls:
        # A reader that has had enough closes the pipe.
        with contextlib.suppress(BrokenPipeError), urlopen(Request(url, headers=signed)) as answer:
            copyfileobj(answer, sys.stdout.buffer, 1 << 16)


if __name__ == "__main__":
    if sys.argv[1] == "--get":
        get(sys.argv[2:])
    else:
        main()
