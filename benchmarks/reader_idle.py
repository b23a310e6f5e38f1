"""How long two training ranks wait for shards on slow storage, with and without preloading.

Claim: with one all_reduce per step, preloading keeps the idle ratio near zero while a block loads faster than it is
trained on (T_load < 0.9 T_train). Without it every block switch of any rank stops all of them:
s T_load / (T_train + s T_load), where s is how many switches there are, for all ranks together, while one block is
trained on and that do not coincide.

Two ranks (gloo, processes of their own) read the same shards from a server on loopback that speaks as much of S3 as
reading takes, and gives each of them a fixed bandwidth. A training step is a sleep: what is measured is the
waiting, in ``next(loader)`` on the slowest rank of each step, as a share of the time, once each rank has had its
first blocks. ``ideal`` reads from memory: its figure is what the machine itself adds. Every round runs all
contestants; those of another environment (``--other PYTHON``: MosaicML Streaming brings an older numpy) too.

    python benchmarks/reader_idle.py --other .venv-bench/bin/python --other .venv-mosaic/bin/python
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

PARTS, SAMPLES, SAMPLE_NBYTES, BATCH = 36, 1024, 8_000, 32
RATE = 20e6
"""Bytes per second and rank."""
RANKS = 2
CLAIM = (
    "idle ratio of two ranks with an all_reduce per step: near theory without preloading, near zero with it"
)
FOREIGN = ("webdataset", "mosaicml-streaming")


# -- the server --------------------------------------------------------------------------------------


class Bandwidth:
    """A fixed number of bytes per second, shared by all connections of one rank."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock, self._free_at = rate, threading.Lock(), 0.0

    def take(self, nbytes: int) -> None:
        """Blocks until the line is free and these bytes would have passed."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._rate
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


def serve(folder: Path, rate: float) -> http.server.ThreadingHTTPServer:
    """Files of a folder as objects, GET with ranges and HEAD, at a fixed rate. The caller shuts it down."""
    line = Bandwidth(rate)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Bodies go out in small writes after their headers: without this each waits for an acknowledgement.
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            path = folder / self.path.split("?")[0].lstrip("/").partition("/")[2]
            if not path.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = path.read_bytes()
            first, last = 0, len(data) - 1
            wanted = self.headers.get("Range")
            if wanted:
                low, _, high = wanted.removeprefix("bytes=").partition("-")
                first, last = int(low), min(last, int(high) if high else last)
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(last - first + 1))
            if wanted:
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            self.send_header("ETag", f'"{path.name}"')
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.end_headers()
            if self.command == "HEAD":
                return
            step = 64 << 10
            with contextlib.suppress(ConnectionError):
                for at in range(first, last + 1, step):
                    piece = data[at : min(at + step, last + 1)]
                    line.take(len(piece))
                    self.wfile.write(piece)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


def write_shards(folder: Path) -> None:
    """The data as tar shards, ``part-000.tar`` ..."""
    rng = random.Random(0)
    for part in range(PARTS):
        with tarfile.open(folder / f"part-{part:03}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for number in range(SAMPLES):
                info = tarfile.TarInfo(f"{part:03}-{number:04}.bin")
                info.size = SAMPLE_NBYTES
                archive.addfile(info, io.BytesIO(rng.randbytes(SAMPLE_NBYTES)))


# -- contestants, in the rank's process ----------------------------------------------------------------


def options(port: int) -> dict[str, Any]:
    """Of the store, for obstore."""
    return {
        "endpoint": f"http://127.0.0.1:{port}",
        "region": "us-east-1",
        "access_key_id": "id",
        "secret_access_key": "secret",
        "virtual_hosted_style_request": False,
    }


def ideal(job: argparse.Namespace) -> Iterator[Any]:
    """Batches from memory."""
    import numpy as np

    batch = np.zeros((BATCH, SAMPLE_NBYTES), np.uint8)
    for _ in range(PARTS * SAMPLES // BATCH // RANKS):
        yield batch.copy()


def ours(
    preload: bool, lanes: int | None = None, cache: str = ""
) -> Callable[[argparse.Namespace], Iterator[Any]]:
    """pipegraph: part after part (``lanes=None``), or in lanes; ``cache`` is ``""``, ``"cold"`` or ``"warm"``."""

    def stream(job: argparse.Namespace) -> Iterator[Any]:
        import pipegraph as pg
        from pipegraph import operators as ops

        order = pg.order.PartOrder() if lanes is None else pg.order.LaneOrder(lanes=lanes)
        graph = pg.Graph("idle", seed=job.seed)
        folder = Path(job.folder) / "node-cache"
        if cache == "cold" and job.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        barrier()
        near = pg.NodeCache(folder, "1 GB") if cache else None
        select = ops.ShardSelect(
            f"s3://data/part-{{000..{PARTS - 1:03}}}.tar",
            order=order,
            manifest=Path(job.folder) / "manifest.json",
            store=options(job.port),
        )
        node = graph.add(select, capacity=8).then(ops.Load(cache=near, preload=preload), capacity=8)
        node.then(ops.Batch(BATCH, collate=list), capacity=1)
        with graph.loader() as loader:
            yield from loader
            if job.rank == 0 and os.environ.get("READER_IDLE_PROFILE"):
                print(loader.profile(), file=sys.stderr)

    return stream


def webdataset(job: argparse.Namespace) -> Iterator[Any]:
    """WebDataset over the same shards, streamed by HTTP, one DataLoader worker that prefetches as by default."""
    import webdataset as wds
    from torch.utils.data import DataLoader

    urls = [
        f"pipe:{sys.executable} {os.path.abspath(__file__)} --get http://127.0.0.1:{job.port}/data/part-{part:03}.tar"
        for part in range(PARTS)
    ]
    random.Random(job.seed).shuffle(urls)
    data = wds.WebDataset(
        urls[job.rank :: RANKS], shardshuffle=False, nodesplitter=as_it_is, empty_check=False
    ).shuffle(100)
    yield from DataLoader(data.batched(BATCH, collation_fn=None), batch_size=None, num_workers=1)


def as_it_is(urls: Iterable[str]) -> Iterable[str]:
    """For WebDataset: each rank has its own shards already."""
    return urls


def mosaic(job: argparse.Namespace) -> Iterator[Any]:
    """MosaicML Streaming over the same samples as MDS shards of the same size; downloads ahead as by default."""
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    os.environ.update(
        S3_ENDPOINT_URL=f"http://127.0.0.1:{job.port}",
        AWS_ACCESS_KEY_ID="id",
        AWS_SECRET_ACCESS_KEY="secret",
        AWS_DEFAULT_REGION="us-east-1",
    )
    # Ranks of one node share this folder: the first of them brings the index.
    local = Path(job.folder) / f"mds-{job.seed}"
    data = StreamingDataset(
        remote="s3://data/mds", local=str(local), batch_size=BATCH, shuffle=True, shuffle_seed=job.seed + 1
    )
    yield from DataLoader(data, batch_size=BATCH, num_workers=1)


CONTESTANTS: dict[str, Callable[[argparse.Namespace], Iterable[Any]]] = {
    "ideal": ideal,
    "parts+preload": ours(True),
    "parts on demand": ours(False),
    "lanes+preload": ours(True, lanes=12),
    "lanes on demand": ours(False, lanes=12),
    "cold cache+preload": ours(True, cache="cold"),
    "warm cache+preload": ours(True, cache="warm"),
    "webdataset": webdataset,
    "mosaicml-streaming": mosaic,
}


def barrier() -> None:
    """Of all ranks."""
    import torch.distributed as dist

    dist.barrier()


def train(job: argparse.Namespace, name: str) -> float:
    """The idle share of one contestant's steps after start-up: what the slowest rank waited for in each."""
    import torch
    import torch.distributed as dist

    steps_per_block = SAMPLES // BATCH
    step_s = SAMPLES * SAMPLE_NBYTES / RATE / job.ratio / steps_per_block
    first = job.warm * steps_per_block
    total = PARTS // RANKS * steps_per_block - steps_per_block
    idle, began, waited = 0.0, 0.0, torch.zeros(1)
    barrier()
    items = iter(CONTESTANTS[name](job))
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
                idle += float(waited[0])
        return idle / (time.perf_counter() - began)
    finally:
        if isinstance(items, Iterator) and hasattr(items, "close"):
            items.close()


def run_rank(job: argparse.Namespace) -> None:
    """The life of one rank: every contestant once; rank 0 prints the figures."""
    import warnings

    import torch.distributed as dist

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name in job.names.split(","):
        try:
            found[name] = train(job, name)
        except ImportError as error:
            found[name] = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    if job.rank == 0:
        print("RESULT", json.dumps(found), flush=True)


# -- the parent ----------------------------------------------------------------------------------------


def run_ranks(
    python: str, folder: Path, ports: list[int], names: list[str], ratio: float, seed: int, warm: int
) -> Any:
    """Both ranks in processes of this interpreter; what rank 0 found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = probe.getsockname()[1]
    ranks = []
    for rank in range(RANKS):
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(master),
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "OMP_NUM_THREADS": "1",
        }
        arguments = ["--rank", rank, "--port", ports[rank], "--folder", folder, "--names", ",".join(names)]
        arguments += ["--ratio", ratio, "--seed", seed, "--warm", warm]
        command = [python, __file__, *map(str, arguments)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        answers = [process.communicate(timeout=240)[0] for process in ranks]
    except subprocess.TimeoutExpired as error:
        raise RuntimeError("not done after 240 s") from error
    finally:
        for process in ranks:
            process.kill()
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"ranks ended with {[process.returncode for process in ranks]}")
    line = next(line for line in answers[0].splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT "))


def theory(name: str, ratio: float) -> float | None:
    """The idle share without preloading. Part after part, equal parts of both ranks end together: one switch."""
    if "on demand" not in name:
        return None
    switches = 1 if name.startswith("parts") else RANKS
    return switches * ratio / (1 + switches * ratio)


def write_mds(python: str, folder: Path) -> bool:
    """The same samples as MDS shards, by an interpreter that has MosaicML Streaming."""
    program = (
        "import random, sys; from streaming import MDSWriter\n"
        f"rng = random.Random(0); size = {SAMPLES} * ({SAMPLE_NBYTES} + 20)\n"
        "with MDSWriter(out=sys.argv[1], columns={'bin': 'bytes'}, size_limit=size) as out:\n"
        f"    for _ in range({PARTS * SAMPLES}): out.write({{'bin': rng.randbytes({SAMPLE_NBYTES})}})\n"
    )
    done = subprocess.run([python, "-c", program, str(folder / "mds")], capture_output=True)
    return done.returncode == 0


def main() -> None:
    import harness

    from pipegraph.storage import build_manifest

    parser = harness.arguments(__doc__ or "", rounds=3)
    parser.add_argument("--ratio", type=float, default=0.8, help="T_load / T_train (default 0.8)")
    parser.add_argument(
        "--warm", type=int, default=9, help="blocks of each rank that are start-up (default 8)"
    )
    parser.add_argument("--other", action="append", default=[], help="interpreters with other packages")
    chosen = parser.parse_args()
    configuration = {
        "ranks": RANKS, "parts": PARTS, "samples": SAMPLES, "sample_nbytes": SAMPLE_NBYTES, "batch": BATCH,
        "rate": RATE, "load_over_train": chosen.ratio, "warm_blocks": chosen.warm, "rounds": chosen.rounds,
    }  # fmt: skip
    harness.header(CLAIM, configuration)
    wanted = [part for part in chosen.only.split(",") if part]
    found: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        write_shards(folder)
        build_manifest(str(folder / "*.tar"), folder / "manifest.json")
        mds = any(write_mds(python, folder) for python in chosen.other)
        servers = [serve(folder, RATE) for _ in range(RANKS)]
        for server in servers:
            stack.callback(server.shutdown)
        ports = [server.server_address[1] for server in servers]
        names = [n for n in CONTESTANTS if not wanted or any(part in n for part in wanted)]
        own = [n for n in names if n not in FOREIGN]
        foreign = [n for n in names if n in FOREIGN and (mds or n != "mosaicml-streaming")]
        for turn in range(chosen.rounds):
            results = (
                []
                if not own
                else [run_ranks(sys.executable, folder, ports, own, chosen.ratio, turn, chosen.warm)]
            )
            for each in foreign:
                for python in chosen.other:
                    if importable(python, each):
                        try:
                            found_here = run_ranks(
                                python, folder, ports, [each], chosen.ratio, turn, chosen.warm
                            )
                        except RuntimeError as error:
                            found_here = {each: str(error)}
                        results.append(found_here)
                        break
                else:
                    missing[each] = "not installed in any --other interpreter"
            for result in results:
                for contestant, idle in result.items():
                    if isinstance(idle, str):
                        missing[contestant] = idle
                        continue
                    found.setdefault(contestant, []).append(idle)
                    print(f"  round {turn + 1}: {contestant:<24} {100 * idle:6.2f} %", flush=True)
    rows, record = [], {}
    for contestant, values in found.items():
        spread, expected = harness.spread(values), theory(contestant, chosen.ratio)
        record[contestant] = {"idle": spread.to_dict(), "theory": expected}
        shown = "" if expected is None else f"{100 * expected:.1f} %"
        spread_shown = f"{100 * spread.low:.2f} - {100 * spread.high:.2f} %"
        rows.append([contestant, f"{100 * spread.median:.2f} %", spread_shown, shown])
    print(harness.table(["", "idle", "spread", "theory"], rows))
    for contestant, reason in missing.items():
        print(f"not measured: {contestant}: {reason}")
    if not chosen.no_record:
        print(
            "recorded in",
            harness.record("reader_idle", CLAIM, configuration, {"idle": record, "missing": missing}),
        )


def importable(python: str, name: str) -> bool:
    """Whether an interpreter has a foreign package."""
    module = {"mosaicml-streaming": "streaming"}.get(name, name)
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0


def get(url: str) -> None:
    """An object to standard output, for WebDataset's pipes where curl is missing."""
    from urllib.request import urlopen

    # A reader that has had enough closes the pipe.
    with contextlib.suppress(BrokenPipeError), urlopen(url) as answer:
        shutil.copyfileobj(answer, sys.stdout.buffer, 1 << 16)


if __name__ == "__main__":
    if "--get" in sys.argv:
        get(sys.argv[2])
    elif "--rank" in sys.argv:
        rank_parser = argparse.ArgumentParser()
        for flag, kind in (("rank", int), ("port", int), ("folder", str), ("names", str)):
            rank_parser.add_argument(f"--{flag}", type=kind)
        for flag, kind in (("ratio", float), ("seed", int), ("warm", int)):
            rank_parser.add_argument(f"--{flag}", type=kind)
        run_rank(rank_parser.parse_args())
    else:
        main()
