"""How long two training ranks wait for shards on slow storage, with and without preloading, and how long with peers.

Claim: with one all_reduce per step, preloading keeps the idle ratio near zero while a block loads faster than it is
trained on. Without it every block switch of any rank stops all of them.

Two ranks (gloo, processes of their own) read the same samples from an S3-compatible server (moto) on loopback, each
through a line of fixed bandwidth. A training step is a sleep: what is measured is the waiting, in ``next(loader)`` on
the slowest rank of each step, as a share of the time, once each rank has had its first blocks. ``ideal`` reads from
memory: its figure is what the machine itself adds, and ``ideal beside a download`` what it adds while as many bytes
arrive. A cold cache is an empty folder. Peers of another environment run in it:

    python benchmarks/reader_idle.py --other .venv-bench/bin/python --other .venv-mosaic/bin/python
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import harness
from harness import Measures

CLAIM = "idle ratio of two ranks with an all_reduce per step: near zero with preloading"
PARTS, SAMPLES, SAMPLE_NBYTES = 36, 1024, 8_000
BATCH, RANKS = 32, 2
RATE = 20e6
"""Bytes per second of each rank's line."""
LOAD_OVER_TRAIN, WARM = 0.8, 9
"""The time to load a block over that to train on it; blocks of each rank that are start-up."""
LIMIT_S = 90
"""Of one contestant in one round."""
MODULES = {"webdataset": "webdataset", "mosaicml-streaming": "streaming"}
HERE = str(Path(__file__).resolve())


@dataclass(frozen=True)
class Job:
    """What the ranks do."""

    name: str  # of the contestant
    ports: list[int]  # each rank's way to the server
    manifest: str  # of the tar shards
    near: str = ""  # an empty folder, for a cache
    rank: int = 0

    def url(self, part: int) -> str:
        """Of a shard, without signing."""
        return f"http://127.0.0.1:{self.ports[self.rank]}/data/part-{part:03}.tar"


# -- contestants -------------------------------------------------------------------------------------


def ideal(job: Job) -> Iterator[Any]:
    """Batches from memory."""
    import numpy as np

    batch = np.zeros((BATCH, SAMPLE_NBYTES), np.uint8)
    for _ in range(PARTS * SAMPLES // BATCH // RANKS):
        yield batch.copy()


def ideal_beside_a_download(job: Job) -> Iterator[Any]:
    """The same while another process of this rank downloads its shards: what the machine adds."""
    command = [sys.executable, HERE, "--get", *[job.url(part) for part in range(job.rank, PARTS, RANKS)]]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as download:
        yield from ideal(job)
        download.kill()


def ours(preload: bool, lanes: int | None = None, cached: bool = False) -> Callable[[Job], Iterator[Any]]:
    """pipegraph: part after part (``lanes=None``), or in lanes; through a node cache or not."""

    def stream(job: Job) -> Iterator[Any]:
        import pipegraph as pg
        from pipegraph import operators as ops

        order = pg.order.PartOrder() if lanes is None else pg.order.LaneOrder(lanes=lanes)
        shards = f"s3://data/part-{{000..{PARTS - 1:03}}}.tar"
        store = options(job.ports[job.rank])
        select = ops.ShardSelect(shards, order=order, manifest=job.manifest, store=store)
        cache = pg.NodeCache(job.near, "1 GB") if cached else None
        # Queues as by default, like the peers'; on demand short ones, since the theory knows of none.
        items, batches = (None, None) if preload else (8, 1)
        load = ops.Load(cache=cache, preload=preload)
        node = pg.Graph("idle").add(select, capacity=items).then(load, capacity=items)
        with harness.loaded(node.then(ops.Batch(BATCH, collate=list), capacity=batches)) as loader:
            yield from loader

    return stream


def webdataset(cached: bool) -> Callable[[Job], Iterator[Any]]:
    """WebDataset over the same shards, streamed by HTTP, one DataLoader worker that prefetches as by default."""

    def stream(job: Job) -> Iterator[Any]:
        import webdataset as wds
        from torch.utils.data import DataLoader

        # curl is not on every machine, and moto wants some signature.
        urls = [f"pipe:{sys.executable} {HERE} --get {job.url(part)}" for part in range(PARTS)]
        random.Random(0).shuffle(urls)
        near = {"cache_dir": job.near} if cached else {}
        mine = urls[job.rank :: RANKS]
        data = wds.WebDataset(mine, shardshuffle=False, nodesplitter=as_it_is, empty_check=False, **near)
        batches = data.shuffle(100).batched(BATCH, collation_fn=None)
        yield from DataLoader(batches, batch_size=None, num_workers=1)

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
        S3_ENDPOINT_URL=f"http://127.0.0.1:{job.ports[job.rank]}",
        AWS_ACCESS_KEY_ID="id",
        AWS_SECRET_ACCESS_KEY="secret",
        AWS_DEFAULT_REGION="us-east-1",
    )
    clean_stale_shared_memory()
    # Ranks of one node share this folder: the first of them brings the index.
    data = StreamingDataset(remote="s3://data/mds", local=job.near, batch_size=BATCH, shuffle=True)
    yield from DataLoader(data, batch_size=BATCH, num_workers=1)


CONTESTANTS: dict[str, Callable[[Job], Iterable[Any]]] = {
    "ideal": ideal,
    "ideal beside a download": ideal_beside_a_download,
    "parts+preload": ours(True),
    "parts on demand": ours(False),
    "lanes+preload": ours(True, lanes=12),
    "lanes on demand": ours(False, lanes=12),
    "pipegraph, cold cache": ours(True, cached=True),
    "webdataset": webdataset(cached=False),
    "webdataset, cold cache": webdataset(cached=True),
    "mosaicml-streaming, cold cache": mosaic,
}

# -- the ranks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """A contestant: both ranks in processes of an interpreter that has its packages."""

    name: str
    job: Job
    others: list[str]

    def python(self) -> str:
        """The first interpreter that has the peer.

        Raises:
            ImportError: none has.
        """
        module = MODULES.get(self.name.partition(",")[0], "torch")
        for python in (sys.executable, *self.others):
            if not subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode:
                return python
        raise ImportError(f"no interpreter has {module}: name one that has with --other")

    def measure(self) -> Measures:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            master = str(probe.getsockname()[1])
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": master, "OMP_NUM_THREADS": "1"}
        world |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
        python = self.python()

        def measured(rank: int) -> Measures:
            job = replace(self.job, name=self.name, near=near, rank=rank)
            command = [python, HERE, "--child", json.dumps(asdict(job))]
            return harness.ask(command, LIMIT_S, {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)})

        def second() -> None:
            with contextlib.suppress(RuntimeError):  # the first says what happened
                measured(1)

        with tempfile.TemporaryDirectory() as near:
            thread = threading.Thread(target=second)
            thread.start()
            try:
                return measured(0)
            finally:
                thread.join()


def trained(job: Job) -> Measures:
    """What the slowest rank waited for in each step, once start-up is over: its share of the time, and its spread."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    steps_per_block = SAMPLES // BATCH
    step_s = SAMPLES * SAMPLE_NBYTES / RATE / LOAD_OVER_TRAIN / steps_per_block
    first = WARM * steps_per_block
    total = PARTS // RANKS * steps_per_block - steps_per_block
    began, waits, waited = 0.0, [], torch.zeros(1)
    dist.barrier()
    items: Any = iter(CONTESTANTS[job.name](job))
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
                waits.append(1e6 * float(waited[0]))
        took = time.perf_counter() - began
    finally:
        dist.barrier()  # nobody stops while the others still train
        if hasattr(items, "close"):
            items.close()
    dist.destroy_process_group()
    ordered = sorted(waits)
    median, late = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    return {"idle": sum(waits) / 1e6 / took, "median_us": median, "p99_us": late, "most_us": ordered[-1]}


def get(urls: list[str]) -> None:
    """Objects to standard output."""
    from urllib.request import Request, urlopen

    signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=id/20200101/us-east-1/s3/aws4_request"}
    for url in urls:
        # A reader that has had enough closes the pipe.
        with contextlib.suppress(BrokenPipeError), urlopen(Request(url, headers=signed)) as found:
            shutil.copyfileobj(found, sys.stdout.buffer, 1 << 16)


# -- the server: moto, and each rank's line of fixed bandwidth to it -----------------------------------

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


class Throttle:
    """A port that leads to another, whose answers share a fixed number of bytes per second."""

    def __init__(self, upstream: int) -> None:
        self._upstream, self._lock, self._free_at = upstream, threading.Lock(), 0.0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.close = self._server.close
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                server = socket.create_connection(("127.0.0.1", self._upstream))
                for pair in ((client, server, False), (server, client, True)):
                    pair[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, throttled: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(64 << 10):
                if throttled:
                    self._wait(len(data))
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        if throttled:
            source.close()
            target.close()

    def _wait(self, nbytes: int) -> None:
        """Until the line is free and these bytes would have passed."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / RATE
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


def options(port: int) -> dict[str, Any]:
    """Of the store, for obstore."""
    return {
        "endpoint": f"http://127.0.0.1:{port}",
        "region": "us-east-1",
        "access_key_id": "id",
        "secret_access_key": "secret",
        "virtual_hosted_style_request": False,
    }


@contextlib.contextmanager
def server() -> Iterator[int]:
    """The port of a moto server in a process of its own, with the bucket ``data``."""
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    quiet = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as process:  # type: ignore[call-overload]
        port = int(process.stdout.readline())
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("PUT", "/data")
            assert connection.getresponse().status == 200
            connection.close()
            yield port
        finally:
            process.stdin.close()


def upload(port: int, folder: Path, prefix: str = "") -> None:
    """Every file of a folder, as objects of the bucket; the folder is removed."""
    import obstore
    from obstore.store import from_url

    store = from_url("s3://data", client_options={"allow_http": True, "timeout": "60s"}, **options(port))
    for path in sorted(folder.iterdir()):
        obstore.put(store, prefix + path.name, path.read_bytes())
    shutil.rmtree(folder)


def write_tar(folder: Path) -> None:
    """The data as tar shards, ``part-000.tar`` ..."""
    rng = random.Random(0)
    for part in range(PARTS):
        with tarfile.open(folder / f"part-{part:03}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for number in range(SAMPLES):
                info = tarfile.TarInfo(f"{part:03}-{number:04}.bin")
                info.size = SAMPLE_NBYTES
                archive.addfile(info, io.BytesIO(rng.randbytes(SAMPLE_NBYTES)))


def write_mds(folder: str) -> None:
    """The same samples as MDS shards of the same size, for MosaicML Streaming."""
    from streaming import MDSWriter

    rng = random.Random(0)
    with MDSWriter(out=folder, columns={"bin": "bytes"}, size_limit=SAMPLES * (SAMPLE_NBYTES + 20)) as out:
        for _ in range(PARTS * SAMPLES):
            out.write({"bin": rng.randbytes(SAMPLE_NBYTES)})


def main() -> None:
    parser = harness.arguments(__doc__, rounds=3)
    parser.add_argument("--other", action="append", default=[], help="interpreters with other packages")
    asked = parser.parse_args()
    if asked.child:
        harness.answer(lambda: trained(Job(**json.loads(asked.child))))
        return
    from pipegraph.storage import build_manifest

    configuration = {
        "ranks": RANKS, "parts": PARTS, "samples": SAMPLES, "sample_nbytes": SAMPLE_NBYTES, "batch": BATCH,
        "rate": RATE, "load_over_train": LOAD_OVER_TRAIN, "warm_blocks": WARM,
        "server": "moto behind a token bucket per rank", "rounds": asked.rounds,
    }  # fmt: skip
    harness.header(CLAIM, configuration)
    with tempfile.TemporaryDirectory() as name, server() as port, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "tar").mkdir()
        write_tar(folder / "tar")
        build_manifest(str(folder / "tar" / "*.tar"), folder / "manifest.json")
        upload(port, folder / "tar")
        lines = [stack.enter_context(contextlib.closing(Throttle(port))) for _ in range(RANKS)]

        def ready(ranks: Ranks) -> str:
            """Its interpreter is there; MosaicML Streaming's writes its own shards."""
            python = ranks.python()
            if CONTESTANTS[ranks.name] is mosaic:
                subprocess.run([python, HERE, "--mds", str(folder / "mds")], check=True, timeout=2 * LIMIT_S)
                upload(port, folder / "mds", "mds/")
            return "ready"

        job = Job("", [line.port for line in lines], str(folder / "manifest.json"))
        others = [str(Path(python).absolute()) for python in asked.other]
        found = harness.contest([Ranks(each, job, others) for each in CONTESTANTS], ready, [], asked)
    idle = {
        each: {
            key: spread if key == "idle" else round(spread["median"])
            for key, spread in measures.items()
            if spread
        }
        for each, measures in found["contestants"].items()
    }
    harness.keep("reader_idle", CLAIM, configuration, {"idle": idle, "missing": found["missing"]}, asked)


if __name__ == "__main__":
    # Other benchmarks lie beside this one, and must not hide packages of the same name.
    sys.path[:] = [folder for folder in sys.path if folder != str(Path(HERE).parent)]
    modes: dict[str, Callable[[list[str]], None]] = {"--get": get, "--mds": lambda names: write_mds(names[0])}
    mode = modes.get(sys.argv[1]) if len(sys.argv) > 1 else None
    if mode:
        mode(sys.argv[2:])
    else:
        main()
