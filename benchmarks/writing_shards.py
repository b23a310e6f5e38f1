"""A folder of small files to tar shards: ``pipegraph pack`` beside ``tar`` and WebDataset's writer.

Claim: several times as fast as WebDataset's writer; killed ten times, a pack ends with the same bytes. ``tar``, which
is compiled and writes one archive without shards, labels, manifest or checksums, shows what is left.

Every contestant is a program of its own, timed from its start to its end, the interpreter's start and imports
included; the files are in the page cache. pipegraph syncs each shard to the disk before it has its name, so ``tar``
runs twice: as it is, and with its archive synced.

    python benchmarks/writing_shards.py --files 100000 --rounds 3 --peers .venv-bench/bin/python --folder FOLDER
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import harness
import numpy as np

CLAIM = "pipegraph pack: several times as fast as WebDataset's writer; killed ten times, the same shards"
SIZE = 128_000_000

WEBDATASET = """
import os, sys
import webdataset as wds
root, out, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
with wds.ShardWriter(os.path.join(out, "shard-%06d.tar"), maxsize=size, maxcount=1 << 30, verbose=0) as writer:
    for label, folder in enumerate(sorted(os.listdir(root))):
        for name in sorted(os.listdir(os.path.join(root, folder))):
            with open(os.path.join(root, folder, name), "rb") as file:
                key = f"{folder}/{name.removesuffix('.jpg')}"
                writer.write({"__key__": key, "jpg": file.read(), "cls": label})
"""

PACK = """
import sys
from pipegraph.storage import pack_shards
def report(state):
    print(state.shards_done, flush=True)
pack_shards(sys.argv[1], sys.argv[2], size=int(sys.argv[3]), workers=int(sys.argv[4]), progress=report)
"""


def write_files(root: Path, count: int) -> int:
    """Files of 2 to 20 kB in a hundred class folders; returns their bytes."""
    rng = np.random.default_rng(0)
    noise = rng.bytes(1 << 22)
    total = 0
    for number in range(count):
        nbytes = int(rng.integers(2_000, 20_000))
        start = int(rng.integers(0, len(noise) - nbytes))
        folder = root / f"{number % 100:03d}"
        if number < 100:
            folder.mkdir(parents=True)
        (folder / f"{number:08d}.jpg").write_bytes(noise[start : start + nbytes])
        total += nbytes
    return total


def digests(folder: Path) -> dict[str, str]:
    """What lies in a folder, by name."""
    return {path.name: hashlib.blake2b(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def killed(root: Path, out: Path, size: int, workers: int, times: int) -> list[int]:
    """Pack, killed ``times`` times while shards are being written, then once to the end.

    Returns:
        the shards that each run found finished.
    """
    command = [sys.executable, "-c", PACK, str(root), str(out), str(size), str(workers)]
    draws = random.Random(0)
    began = []
    for _ in range(times):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            began.append(int(process.stdout.readline()))
            # Behind one of the shards that follow: the other workers are in the middle of theirs.
            for _ in range(draws.randrange(3)):
                process.stdout.readline()
            os.kill(process.pid, signal.SIGKILL)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--peers", default=sys.executable, help="the interpreter that has webdataset")
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        compare(Path(name), arguments)


def compare(folder: Path, arguments: argparse.Namespace) -> None:
    """Write the files, let every contestant run once in each round, and print and record the figures."""
    root, out = folder / "files", folder / "out"
    nbytes = write_files(root, arguments.files)
    size, workers = str(arguments.size), str(arguments.workers)
    archive = str(out / "all.tar")
    tar = ["tar", "--sort=name", "-cf", archive, "-C", str(root), "."]
    pack = [sys.executable, "-m", "pipegraph.cli", "pack", str(root), str(out), "--size", size, "--workers"]
    contestants: dict[str, list[list[str]]] = {
        f"pipegraph pack, {workers} workers": [[*pack, workers]],
        "pipegraph pack, 1 worker": [[*pack, "1"]],
        "tar": [tar],
        "tar, synced": [tar, ["sync", archive]],
        "WebDataset's writer": [[arguments.peers, "-c", WEBDATASET, str(root), str(out), size]],
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(arguments.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds[name].append(timed(contestants[name], out))
    ours = seconds[names[0]]
    results: dict[str, object] = {}
    for name, spent in seconds.items():
        ratios = [theirs / mine for theirs, mine in zip(spent, ours, strict=True)]
        results[name] = {
            "s": harness.spread(spent).to_dict(),
            "mb_per_s": harness.spread([nbytes / 1e6 / each for each in spent]).to_dict(),
            "time_over_ours": harness.spread(ratios).to_dict(),
        }
        print(f"{name:32} {results[name]}")
    if arguments.kills:
        out.mkdir()
        subprocess.run([*pack, "1"], check=True, stdout=subprocess.DEVNULL)
        whole = digests(out)
        began = killed(root, folder / "killed", arguments.size, arguments.workers, arguments.kills)
        again = digests(folder / "killed")
        odd = sorted(name for name in {*whole, *again} if whole.get(name) != again.get(name))
        same = not odd
        results["killed"] = {"times": len(began), "shards_found_finished": began, "same_bytes": same}
        print("killed:", results["killed"])
        if not same:
            raise SystemExit(f"the pack that was killed differs in {', '.join(odd)}")
    if not arguments.no_record:
        configuration = {
            "files": arguments.files,
            "nbytes": nbytes,
            "rounds": arguments.rounds,
            "shard_nbytes": arguments.size,
            "webdataset": version(arguments.peers),
        }
        print("recorded in", harness.record("writing_shards", CLAIM, configuration, results).name)


def timed(commands: list[list[str]], out: Path, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of some programs, one after the other, into an empty folder."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    os.sync()  # what the contestant before has left to write is not this one's
    start = clock()
    for command in commands:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    spent = clock() - start
    shutil.rmtree(out)
    return spent


def version(python: str) -> str:
    """Of the WebDataset that an interpreter has."""
    code = "import importlib.metadata; print(importlib.metadata.version('webdataset'))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
