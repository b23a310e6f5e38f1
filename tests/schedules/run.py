"""Runs the models under many schedules and prints a table; the first failure ends it.

python tests/schedules/run.py                      for ten minutes, on all cores
python tests/schedules/run.py --total 1000000      so many schedules over all models
python tests/schedules/run.py --model Diamond --seconds 60
python tests/schedules/run.py --lines              every line of engine and reader is a switch point
python tests/schedules/run.py --record             the table is kept, and shown in docs/schedules.md
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from schedule_models import LINES, MODELS  # noqa: E402  the paths come first
from scheduler import Report, explore  # noqa: E402

ROUND = 100
"""Schedules of a whole loader that a process runs at a time."""


SAY_S = 10.0
"""Between two lines about the progress."""


def one_round(name: str, first_seed: int, schedules: int, lines: bool) -> Report:
    logging.disable(logging.CRITICAL)
    return explore(MODELS[name], schedules, first_seed=first_seed, lines=LINES if lines else ())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one; may be repeated")
    parser.add_argument("--seconds", type=float, default=600.0, help="for how long, at most (default 600)")
    parser.add_argument("--total", type=int, help="schedules over all models, however long they take")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)"
    )
    parser.add_argument(
        "--lines", action="store_true", help="every line of engine and reader is a switch point"
    )
    parser.add_argument("--record", action="store_true", help="keep the table in benchmarks/results")
    given = parser.parse_args()
    names = given.model or list(MODELS)
    weights = sum(MODELS[name].weight for name in names)
    size = ROUND if given.total is None else min(ROUND, max(1, given.total // weights))
    size = max(1, size // 5) if given.lines else size
    begun = said = time.monotonic()
    reports = {name: Report(name) for name in names}

    def order() -> Any:
        number = 0
        while True:
            for name in names:
                count = size * MODELS[name].weight
                yield name, given.seed + number * count, count
            number += 1

    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        orders, running, ordered = order(), {}, 0

        def more() -> bool:
            return ordered < given.total if given.total else time.monotonic() - begun < given.seconds

        while running or more():
            while more() and len(running) < given.jobs:
                name, seed, count = next(orders)
                running[pool.submit(one_round, name, seed, count, given.lines)] = name
                ordered += count
            done = next(as_completed(running))
            name = running.pop(done)
            try:
                report = done.result()
            except AssertionError as error:
                print(f"\n{error.__cause__ or ''}\n{error}", file=sys.stderr)
                for each in running:
                    each.cancel()
                return 1
            reports[name].add(report)
            if time.monotonic() - said > SAY_S:
                said = time.monotonic()
                total = sum(each.schedules for each in reports.values())
                print(
                    f"{total:,} schedules over all models, {said - begun:.0f} s", file=sys.stderr, flush=True
                )
    _table(list(reports.values()))
    if given.record:
        _record(list(reports.values()), given.lines)
    return 0


def _table(reports: list[Report]) -> None:
    print(f"{'model':24}{'schedules':>11}{'distinct':>11}{'points each':>13}{'lines':>7}{'a second':>10}")
    for each in [*reports, _all(reports)]:
        row = f"{each.model:24}{each.schedules:>11,}{each.distinct:>11,}"
        row += f"{each.steps / max(1, each.schedules):>13.0f}{len(each.places):>7,}"
        print(f"{row}{each.schedules / max(each.seconds, 1e-9):>10.0f}")


def _all(reports: list[Report]) -> Report:
    whole = Report("all")
    for each in reports:
        whole.add(each)
    return whole


def _record(reports: list[Report], lines: bool) -> None:
    """Keep the table as a record; ``benchmarks/figures.py`` shows it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from records import record

    models = {
        each.model: {
            "schedules": each.schedules,
            "distinct": each.distinct,
            "switch_points": each.steps,
            "lines": len(each.places),
            "seconds": round(each.seconds, 1),
        }
        for each in [*reports, _all(reports)]
    }
    claim = "no schedule fails, and nearly all differ"
    print(record("schedules_lines" if lines else "schedules", claim, {"lines": lines}, {"models": models}))


if __name__ == "__main__":
    sys.exit(main())
