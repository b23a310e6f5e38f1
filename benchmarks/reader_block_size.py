"""How large the blocks of a manifest should be: seconds to the first batch, and bytes per second after it.

Claim: blocks of a few ranges give the first batch many times earlier than blocks of 128 MB, at the same throughput.

A store of this machine stands for one far away: every answer comes after ``LATENCY_S``, a connection carries
``CONNECTION`` bytes per second, all together the line's. Sizes are a sixteenth of real ones (a range is 0.5 MiB, not
8), and so is the speed of a connection, so that a request takes as long as a real one.

    python benchmarks/reader_block_size.py                       every block size at both lines
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import io
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CLAIM = "blocks of a few ranges give the first batch many times earlier than blocks of 128 MB, at the same throughput"
SCALE = 16
PARTS, SAMPLES, SAMPLE_NBYTES = 16, 1500, 8_000
LATENCY_S, CONNECTION = 0.05, 80e6 / SCALE
LINES = {"10 Gb/s": 1250e6 / SCALE, "2 Gb/s": 250e6 / SCALE}
BLOCKS = (4, 8, 16, 32, 64, 128)
"""Real sizes in MB."""
BATCH, LANES = 64, 16


# -- the store -----------------------------------------------------------------------------------------


class Store:
    """Objects of a folder over HTTP/1.1, as slow as one far away."""

    def __init__(self, folder: Path, line: float) -> None:
        self._folder, self._line = folder, line
        self._free_at = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode("latin-1"), writer)
        writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        method, path, _ = head.split(" ", 2)
        data = (self._folder / path.lstrip("/")).read_bytes()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        asked = next((value for name, value in fields.items() if name.lower() == "range"), None)
        first, last = 0, len(data) - 1
        if asked is not None:
            low, _, high = asked.removeprefix("bytes=").partition("-")
            first, last = int(low), int(high or last)
        found = f"HTTP/1.1 {'200 OK' if asked is None else '206 Partial Content'}\r\n"
        found += f"Content-Length: {last - first + 1}\r\nContent-Range: bytes {first}-{last}/{len(data)}\r\n"
        found += 'ETag: "1"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n'
        await asyncio.sleep(LATENCY_S)
        writer.write(found.encode())
        if method == "HEAD":
            return
        loop, sent = asyncio.get_running_loop(), first
        began = loop.time()
        while sent <= last:
            some = data[sent : min(sent + (64 << 10), last + 1)]
            sent += len(some)
            self._free_at = max(self._free_at, loop.time()) + len(some) / self._line
            due = max(self._free_at, began + (sent - first) / CONNECTION)
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            writer.write(some)
            await writer.drain()


async def serve(folder: str, line: float) -> None:
    """Until standard input closes; prints the port."""
    store = Store(Path(folder), line)
    server = await asyncio.start_server(store.serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextlib.contextmanager
def store_of(folder: Path, line: float) -> Iterator[str]:
    """The URL of a store in a process of its own."""
    command = [sys.executable, __file__, "--serve", str(folder), "--line", str(line)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


# -- what is measured ----------------------------------------------------------------------------------


def write_parts(folder: Path) -> None:
    """Tar shards ``part-00.tar`` ..."""
    rng = random.Random(0)
    for part in range(PARTS):
        with tarfile.open(folder / f"part-{part:02}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for number in range(SAMPLES):
                info = tarfile.TarInfo(f"{part:02}-{number:04}.bin")
                info.size = SAMPLE_NBYTES
                archive.addfile(info, io.BytesIO(rng.randbytes(SAMPLE_NBYTES)))


def read(root: str, manifest: Path, seed: int, pace: float) -> dict[str, Any]:
    """One epoch: seconds to the first batch, MB/s of real size over the rest, and requests."""
    import pipegraph as pg
    from pipegraph import operators as ops
    from pipegraph.storage.stores import StoreClient

    defaults = StoreClient.__init__.__kwdefaults__
    defaults["range_nbytes"] = (8 << 20) // SCALE
    graph = pg.Graph("blocks", seed=seed)
    parts = [f"{root}/part-{part:02}.tar" for part in range(PARTS)]
    select = ops.ShardSelect(parts, manifest=str(manifest), order=pg.order.LaneOrder(lanes=LANES))
    graph.add(select).then(ops.Load()).then(ops.Batch(BATCH, collate=list, drop_last=True))
    with graph.loader(memory_limit="2 GB") as loader:
        began = time.perf_counter()
        batches = iter(loader)
        next(batches)
        first = time.perf_counter()
        count = 0
        for _ in batches:
            count += 1
            if pace:  # so long is a training step
                time.sleep(BATCH * SAMPLE_NBYTES * SCALE / 1e6 / pace)
        end = time.perf_counter()
        counters = loader.profile().stages["load"].counters
    return {
        "first_s": first - began,
        "mb_per_s": count * BATCH * SAMPLE_NBYTES * SCALE / 1e6 / (end - first),
        "epoch_s": end - began,
        "requests": counters["store requests"],
    }


def child(*arguments: str) -> dict[str, Any]:
    """`read` in a process of its own."""
    import json

    done = subprocess.run(
        [sys.executable, __file__, "--read", *arguments], check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--line", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--read", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--pace", type=float, default=0.0, help="MB/s that training takes; 0: all it gets")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, nargs="+", default=list(BLOCKS))
    parser.add_argument("--lines", nargs="+", choices=list(LINES), default=list(LINES))
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve, options.line))
        return
    if options.read:
        import json

        root, manifest, seed, pace = options.read
        print(json.dumps(read(root, Path(manifest), int(seed), float(pace))))
        return
    import harness

    from pipegraph.storage import build_manifest

    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_parts(folder)
        manifests = {}
        for mb in options.blocks:
            manifests[mb] = folder / f"{mb}.json"
            build_manifest(sorted(folder.glob("*.tar")), manifests[mb], block_nbytes=mb * 1_000_000 // SCALE)
        for round_ in range(options.rounds):
            for line in options.lines:
                rate = LINES[line]
                for mb in options.blocks:
                    with store_of(folder, rate) as root:
                        found = child(root, str(manifests[mb]), str(round_), str(options.pace))
                    results.setdefault(f"{line}, {mb} MB", []).append(found)
    rows = []
    for label, runs in results.items():
        middle = functools.partial(lambda runs, key: sorted(run[key] for run in runs)[len(runs) // 2], runs)
        spread = f"{min(r['first_s'] for r in runs):.2f}-{max(r['first_s'] for r in runs):.2f}"
        rows.append(
            [
                label,
                f"{middle('first_s'):.2f}",
                spread,
                f"{middle('mb_per_s'):.0f}",
                str(middle("requests")),
                f"{middle('epoch_s'):.1f}",
            ]
        )
    print(harness.table(["", "first batch, s", "spread", "MB/s", "requests", "epoch, s"], rows))
    harness.record(
        "reader_block_size",
        CLAIM,
        {
            "blocks_mb": options.blocks,
            "rounds": options.rounds,
            "pace": options.pace,
            "scale": SCALE,
        },
        results,
    )


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    main()
