"""Runs the models under many schedules and prints a table; the first failure ends it.

python tests/schedules/run.py                      for ten minutes, on all cores
python tests/schedules/run.py --total 1000000      so many schedules over all models
python tests/schedules/run.py --model Diamond --seconds 60
python tests/schedules/run.py --places             with the lines of the engine that were switch points
python tests/schedules/run.py --lines              every line of engine and reader is one
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

from schedule_models import MODELS  # noqa: E402  the paths come first
from scheduler import Report, explore  # noqa: E402

ROUND = 500
"""Schedules of a whole loader that a process runs at a time."""


MOST_STEPS = 500_000
"""Switch points of one schedule, where each line is one."""


def one_round(name: str, first_seed: int, schedules: int, places: bool, lines: bool) -> Report:
    logging.disable(logging.CRITICAL)
    model = MODELS[name]
    if not lines:
        return explore(model, schedules, first_seed=first_seed, places=places)
    folders = ("engine", "reader", "loader", "replicas")
    files = [path for folder in folders for path in (ROOT / "pipegraph" / folder).rglob("*.py")]
    traced = tuple(str(path.relative_to(ROOT)) for path in files if path.name != "__init__.py")
    return explore(model, schedules, first_seed=first_seed, places=places, lines=traced, max_steps=MOST_STEPS)


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
        "--places", action="store_true", help="count the lines that were switch points; slower"
    )
    parser.add_argument(
        "--lines", action="store_true", help="every line of engine and reader is a switch point"
    )
    given = parser.parse_args()
    names = given.model or list(MODELS)
    weights = sum(MODELS[name].weight for name in names)
    size = ROUND if given.total is None else min(ROUND, max(1, given.total // weights))
    size = max(1, size // 10) if given.lines else size
    begun = time.monotonic()
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
                running[pool.submit(one_round, name, seed, count, given.places, given.lines)] = name
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
            _add(reports[name], report)
            total = sum(each.schedules for each in reports.values())
            print(
                f"\r{total:,} schedules, {time.monotonic() - begun:.0f} s ",
                end="",
                file=sys.stderr,
                flush=True,
            )
    print(file=sys.stderr)
    _table(list(reports.values()), given.places)
    return 0


def _add(whole: Report, part: Report) -> None:
    whole.schedules += part.schedules
    whole.distinct += part.distinct
    whole.steps += part.steps
    whole.seconds += part.seconds
    whole.places |= part.places


def _table(reports: list[Report], places: bool) -> None:
    print(
        f"{'model':24}{'schedules':>11}{'distinct':>11}{'points each':>13}{'a second':>10}"
        + "  lines" * places
    )
    for each in reports:
        count = max(1, each.schedules)
        row = f"{each.model:24}{each.schedules:>11,}{each.distinct:>11,}{each.steps / count:>13.0f}"
        row += f"{each.schedules / max(each.seconds, 1e-9):>10.0f}"
        print(row + (f"{len(each.places):>7}" if places else ""))
    print(f"{'all':24}{sum(r.schedules for r in reports):>11,}{sum(r.distinct for r in reports):>11,}")


if __name__ == "__main__":
    sys.exit(main())
