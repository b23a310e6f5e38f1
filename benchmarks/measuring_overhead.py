"""What measuring costs: a stage at 10,000 items/s with its counters and clocks, and with a trace on.

Claim: measuring under 1 % of a second's processor time at 10,000 items/s per stage, tracing under 5 %.

The instruments are called as the stages call them, in a loop beside an empty one; the difference per item times 10,000
is the share. Tracing is measured whole: a pipeline's processor time per item with and without, in turn; once in one
thread, where nothing else varies, and once with a thread per stage.

    python benchmarks/measuring_overhead.py --rounds 9
"""

from __future__ import annotations

import argparse
import statistics
import time

import harness

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine.meter import Meter

CLAIM = "measuring under 1 % of a core at 10,000 items/s per stage, tracing under 5 %"

ITEMS = 200_000
CHAIN_ITEMS = 5_000
RATE = 10_000


def measured(items: int) -> float:
    """Seconds of processor time for the counters and clocks of so many items."""
    meter, now = Meter("stage"), time.perf_counter_ns
    begun = time.thread_time()
    for _ in range(items):
        start = now()
        meter.busy_ns += now() - start
        meter.calls += 1
        meter.items += 1
        meter.samples += 1
    return time.thread_time() - begun


def empty(items: int) -> float:
    """The loop alone."""
    begun = time.thread_time()
    for _ in range(items):
        pass
    return time.thread_time() - begun


def pipeline(items: int, backend: str, traced: bool) -> float:
    """Processor seconds per item and stage of a chain of four."""
    graph = pg.Graph("chain")
    node = graph.add(ops.FromIterable(range(items)), name="read", capacity=1, backend=backend)
    for number in range(3):
        node = node.then(abs, name=f"stage-{number}", capacity=1, backend=backend)
    with graph.loader() as loader:
        if traced:
            loader._trace(True)
        begun = time.process_time()
        for _ in loader:
            pass
        return (time.process_time() - begun) / items / 4


def main() -> None:
    """Print both shares, with their spread."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--rounds", type=int, default=9)
    asked.add_argument("--no-record", action="store_true", help="print only")
    options = asked.parse_args()
    rounds = options.rounds
    shares = {"measuring": [100 * (measured(ITEMS) - empty(ITEMS)) / ITEMS * RATE for _ in range(rounds)]}
    for backend in ("inline", "thread"):
        name = f"tracing adds, {backend}"
        shares[name] = []
        for _ in range(rounds):
            plain = pipeline(CHAIN_ITEMS, backend, False)
            shares[name].append(100 * (pipeline(CHAIN_ITEMS, backend, True) - plain) * RATE)
    for name, each in shares.items():
        print(
            f"{name}: {statistics.median(each):.2f} % at 10,000 items/s ({min(each):.2f} to {max(each):.2f})"
        )
    if not options.no_record:
        results = {
            name: {
                "percent": round(statistics.median(each), 3),
                "from": round(min(each), 3),
                "to": round(max(each), 3),
            }
            for name, each in shares.items()
        }
        print("recorded in", harness.record("measuring_overhead", CLAIM, {"rounds": rounds}, results).name)


if __name__ == "__main__":
    main()
