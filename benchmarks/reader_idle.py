"""How long two training ranks wait for shards on slow storage, with and without preloading, and how long with peers.

Claim: with one all_reduce per step, preloading keeps the idle ratio near zero while a block loads faster than it is
trained on (T_load < 0.9 T_train). Without it every block switch of any rank stops all of them.

Two ranks (gloo, processes of their own) read the same samples from an S3-compatible server (moto) on loopback,
each through a line of fixed bandwidth. A training step is a sleep: what is measured is the waiting, in
``next(loader)`` on the slowest rank of each step, as a share of the time, once each rank has had its first blocks.
``ideal`` reads from memory: its figure is what the machine itself adds, and ``ideal beside a download`` what it adds
while as many bytes arrive. Contestants take turns; each has processes and a time limit of its own, and one that
fails is recorded with its reason. A cold cache is an empty folder, a warm one is what the cold run of the same round
has left. Peers of another environment run in it:

    python benchmarks/reader_idle.py --other .venv-bench/bin/python --other .venv-mosaic/bin/python
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness
import reader_idle_store as store
from reader_idle_rank import BATCH, CONTESTANTS, RANKS, RATE

CLAIM = "idle ratio of two ranks with an all_reduce per step: near zero with preloading"
LIMIT_S = 90
"""Of one contestant in one round."""
MODULES = {"webdataset": "webdataset", "mosaicml-streaming": "streaming"}


class Failed(Exception):
    """Why a contestant has no figure."""


def family(name: str) -> str:
    """Contestants of one family share a cache folder within a round."""
    return name.partition(",")[0]


def run_ranks(python: str, ports: list[int], job: Mapping[str, Any]) -> dict[str, float]:
    """Both ranks in processes of this interpreter; what rank 0 found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = probe.getsockname()[1]
    ranks = []
    with contextlib.ExitStack() as stack:
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
            program = str(Path(__file__).with_name("reader_idle_rank.py"))
            command = [python, program, json.dumps({**job, "port": ports[rank]})]
            said = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                start_new_session=True,
            )
            ranks.append((process, said))
            stack.callback(end, process)
        until = time.monotonic() + LIMIT_S
        try:
            answers = [
                process.communicate(timeout=max(0, until - time.monotonic()))[0] for process, _ in ranks
            ]
        except subprocess.TimeoutExpired:
            raise Failed(f"not done after {LIMIT_S} s") from None
        for line in answers[0].splitlines():
            if line.startswith("RESULT"):
                found: dict[str, float] = json.loads(line.removeprefix("RESULT "))
                return found
        reasons = []
        for _, said in ranks:
            said.seek(0)
            lines = [line for line in said.read().splitlines() if line.strip()]
            reasons += ([line for line in lines if "Error" in line] or lines)[-1:]
        raise Failed("; ".join(reasons) or f"ranks ended with {[p.returncode for p, _ in ranks]}")


def end(process: subprocess.Popen[str]) -> None:
    """A rank and the workers it may have left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()
    if process.stdout:
        process.stdout.close()


def interpreters(others: list[str], names: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Which interpreter runs each contestant, and why the rest has none."""
    found, missing = {}, {}
    for name in names:
        module = MODULES.get(family(name))
        if module is None:
            found[name] = sys.executable
            continue
        reason = "no --other interpreter given"
        for python in others:
            tried = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True)
            if tried.returncode == 0:
                found[name] = python
                break
            reason = f"{python}: {tried.stderr.strip().splitlines()[-1]}"
        else:
            missing[name] = reason
    return found, missing


def prepare(folder: Path, port: int, python_of: Mapping[str, str]) -> dict[str, str]:
    """Write and upload what the contestants read; why a format is missing."""
    from pipegraph.storage import build_manifest

    tar, mds = folder / "tar", folder / "mds"
    tar.mkdir()
    store.write_tar(tar)
    build_manifest(str(tar / "*.tar"), folder / "manifest.json")
    store.upload(port, tar)
    shutil.rmtree(tar)
    peer = "mosaicml-streaming"
    python = next((python_of[name] for name in python_of if family(name) == peer), None)
    if python is None:
        return {}
    command = [python, store.__file__, str(mds)]
    try:
        written = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_S)
    except subprocess.TimeoutExpired:
        return {peer: f"its shards were not written within {2 * LIMIT_S} s"}
    if written.returncode:
        return {peer: "its shards: " + written.stderr.strip().splitlines()[-1]}
    store.upload(port, mds, "mds/")
    shutil.rmtree(mds)
    return {}


def choose(only: str) -> list[str]:
    """Contestants by parts of their names; a warm cache needs the cold run."""
    wanted = [part for part in only.split(",") if part]
    names = [name for name in CONTESTANTS if not wanted or any(part in name for part in wanted)]
    needed = {name.replace("warm", "cold") for name in names}
    return [name for name in CONTESTANTS if name in names or name in needed]


def rotated(names: list[str], turn: int) -> list[str]:
    """Another family first in each round; cold before warm."""
    families = list(dict.fromkeys(map(family, names)))
    shift = turn * len(families) // 3 % len(families)
    return [name for each in families[shift:] + families[:shift] for name in names if family(name) == each]


def report(found: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Print the table; the record's part."""
    rows, results = [], {}
    for name in CONTESTANTS:
        if not (runs := found.get(name)):
            continue
        spread = harness.spread(run["idle"] for run in runs)
        waits = {
            key: round(statistics.median(run[key] for run in runs))
            for key in ("median_us", "p99_us", "most_us")
        }
        results[name] = {"idle": spread.to_dict(), "rounds": len(runs), **waits}
        rows.append(
            [
                name,
                f"{100 * spread.median:.2f} %",
                f"{100 * spread.low:.2f} - {100 * spread.high:.2f} %",
                f"{waits['median_us']} / {waits['p99_us']} / {waits['most_us']}",
            ]
        )
    print(harness.table(["", "idle", "spread", "wait per step, us: median / p99 / most"], rows))
    return results


def main() -> None:
    parser = harness.arguments(__doc__ or "", rounds=3)
    parser.add_argument("--ratio", type=float, default=0.8, help="T_load / T_train (default 0.8)")
    parser.add_argument(
        "--warm", type=int, default=9, help="blocks of each rank that are start-up (default 9)"
    )
    parser.add_argument("--other", action="append", default=[], help="interpreters with other packages")
    chosen = parser.parse_args()
    configuration = {
        "ranks": RANKS, "parts": store.PARTS, "samples": store.SAMPLES, "sample_nbytes": store.SAMPLE_NBYTES,
        "batch": BATCH, "rate": RATE, "load_over_train": chosen.ratio, "warm_blocks": chosen.warm,
        "server": "moto behind a token bucket per rank", "rounds": chosen.rounds,
    }  # fmt: skip
    harness.header(CLAIM, configuration)
    others = [str(Path(python).absolute()) for python in chosen.other]
    found: dict[str, list[dict[str, float]]] = {}
    python_of, missing = interpreters(others, choose(chosen.only))
    try:
        with tempfile.TemporaryDirectory() as name, store.server() as server, contextlib.ExitStack() as stack:
            folder = Path(name)
            without = prepare(folder, server, python_of)
            lines = [store.Throttle(server, RATE) for _ in range(RANKS)]
            for line in lines:
                stack.callback(line.close)
            ports = [line.port for line in lines]
            names = [each for each in python_of if family(each) not in without]
            missing |= {each: without[family(each)] for each in python_of if family(each) in without}
            for turn in range(chosen.rounds):
                for each in rotated(names, turn):
                    job = {
                        "name": each,
                        "manifest": str(folder / "manifest.json"),
                        "near": str(folder / f"{family(each)}-{turn}".replace(" ", "-")),
                        # A warm cache is read in another order than the one that filled it.
                        "seed": 2 * turn + ("warm" in each),
                        "ratio": chosen.ratio,
                        "warm": chosen.warm,
                    }
                    began = time.monotonic()
                    try:
                        result = run_ranks(python_of[each], ports, job)
                    except Failed as reason:
                        missing[each] = f"round {turn + 1}: {reason}"
                        print(f"  round {turn + 1}: {each:<38} {reason}", flush=True)
                        continue
                    found.setdefault(each, []).append(result)
                    took = time.monotonic() - began
                    print(
                        f"  round {turn + 1}: {each:<38} {100 * result['idle']:6.2f} %  ({took:.0f} s)",
                        flush=True,
                    )
                for path in folder.glob(f"*-{turn}"):
                    shutil.rmtree(path, ignore_errors=True)
    finally:
        results = report(found)
        for each, why in missing.items():
            print(f"not measured: {each}: {why}")
        if found and not chosen.no_record:
            row = {"idle": results, "runs": found, "missing": missing}
            print("recorded in", harness.record("reader_idle", CLAIM, configuration, row))


if __name__ == "__main__":
    main()
