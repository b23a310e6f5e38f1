"""What every benchmark shares: alternated runs, ratios with their spread, and one dated record per
run.

A contestant opens a stream that is longer than what is timed. The harness draws ``warm`` items from it
(buffers full, workers up), times the next ``timed`` ones, and closes it while more would follow. So
start-up and drain are outside the measured span, and a deep buffer earns nothing.

One round lets every contestant run once; the rounds are repeated, each starting with the next
contestant. Only ratios *within* one round are meaningful on a machine that others use too: the report
gives their median, least and greatest over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from records import RESULTS as RESULTS, machine as machine, record as record, versions as versions

FAILED = "failed: "
LIMIT_S = 300
"""A child that takes longer is ended with all its processes, and named."""


@dataclass(frozen=True)
class Contestant:
    """One way to do the job.

    Attributes:
        name: how the tables call it.
        stream: opens a fresh stream of items; leaving the context ends its threads and processes.
        warm: items drawn before the clock starts.
        timed: items drawn while it runs (a slow contestant takes fewer).
        weight: units of work in one item (for example images in a batch).
    """

    name: str
    stream: Callable[[], AbstractContextManager[Iterable[Any]]]
    warm: int
    timed: int
    weight: float = 1.0

    def measure(self) -> Run:
        """Open, warm up, time and close.

        Raises:
            RuntimeError: the stream ended before the timed span did.
        """
        gc.collect()
        with self.stream() as stream:
            items = iter(stream)
            drawn = sum(1 for _ in islice(items, self.warm))
            cpu = cpu_seconds()
            start = time.perf_counter()
            # Drawn at C speed and only the last kept: the consumer costs next to nothing.
            tail = deque(enumerate(islice(items, self.timed), 1), maxlen=1)
            wall_s = time.perf_counter() - start
            cpu_s = spent_s(cpu, cpu_seconds())
            drawn += tail[0][0] if tail else 0
            tail.clear()
            # The stream's own iterator goes first, as at the end of a user's loop.
            del items
        if drawn < self.warm + self.timed:
            raise RuntimeError(f"{self.name}: the stream ended after {drawn} items, inside the timed span")
        return Run(wall_s, cpu_s, self.timed * self.weight)


@dataclass(frozen=True)
class Run:
    """One contestant's timed span: wall seconds, and CPU seconds of this process and its descendants."""

    wall_s: float
    cpu_s: float
    units: float

    @property
    def rate(self) -> float:
        """Units of work per second of wall time."""
        return self.units / self.wall_s


@dataclass
class Race:
    """All runs of one comparison: ``runs[name][r]`` is round r; ``missing[name]`` says why one has none."""

    runs: dict[str, list[Run]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def ratios(self, name: str, over: str) -> Spread:
        """Rate of ``name`` over that of ``over``, round by round."""
        pairs = zip(self.runs[name], self.runs[over], strict=True)
        return spread(a.rate / b.rate for a, b in pairs)

    def cpu_ratios(self, name: str, over: str) -> Spread:
        """Work per CPU second of ``name`` over that of ``over``: what a busy machine leaves comparable."""
        pairs = zip(self.runs[name], self.runs[over], strict=True)
        return spread((b.cpu_s / b.units) / max(a.cpu_s / a.units, 1e-12) for a, b in pairs)


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of repeated measurements."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}-{self.high:.3g})"

    def to_dict(self) -> dict[str, float]:
        """For the record: three numbers, rounded to four digits."""
        return {key: float(f"{value:.4g}") for key, value in vars(self).items()}


def spread(values: Iterable[float]) -> Spread:
    """Median and range of at least one value."""
    ordered = sorted(values)
    return Spread(statistics.median(ordered), ordered[0], ordered[-1])


def cpu_seconds() -> dict[tuple[int, float], float]:
    """CPU time used so far by this process and by each of its living descendants, as Linux's /proc has it.

    Returns:
        Seconds by process number and the clock tick at which the process was started.
    """
    children: dict[int, list[tuple[int, float, float]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()  # from the third on; see proc(5)
            spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            children.setdefault(int(fields[1]), []).append((int(stat.parent.name), float(fields[19]), spent))
    found, parents = {(0, 0.0): time.process_time()}, [os.getpid()]
    while parents:
        for number, begun, spent in children.get(parents.pop(), ()):
            found[number, begun] = spent
            parents.append(number)
    return found


def spent_s(before: Mapping[tuple[int, float], float], after: Mapping[tuple[int, float], float]) -> float:
    """CPU time between two readings of those that live at the second; what ended in between was somebody else's."""
    return sum(seconds - before.get(process, 0.0) for process, seconds in after.items())


def race(contestants: Sequence[Any], rounds: int) -> Race:
    """Run all contestants in turn, ``rounds`` times; one that fails is left out and its reason kept."""
    result = Race()
    entered = list(contestants)
    for number in range(rounds):
        shift = number % len(entered) if entered else 0
        for contestant in entered[shift:] + entered[:shift]:
            try:
                run = contestant.measure()
            except Exception as error:
                result.missing[contestant.name] = reason(error)
                print(
                    f"  round {number + 1}: {contestant.name:<34} {result.missing[contestant.name]}",
                    file=sys.stderr,
                )
                if not isinstance(error, ImportError):
                    traceback.print_exc()
                continue
            result.runs.setdefault(contestant.name, []).append(run)
            print(
                f"  round {number + 1}: {contestant.name:<34} {run.rate:>12,.0f}/s",
                file=sys.stderr,
                flush=True,
            )
        entered = [contestant for contestant in entered if contestant.name not in result.missing]
    for name in result.missing:
        result.runs.pop(name, None)
    return result


def reason(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def attempt(contestants: Iterable[Any], action: Callable[[Any], str]) -> dict[str, str]:
    """Do something once with each; one that cannot says ``failed: reason``, so that no failure is silent."""
    outcomes = {}
    for contestant in contestants:
        try:
            outcomes[contestant.name] = action(contestant)
        except Exception as error:
            outcomes[contestant.name] = f"{FAILED}{reason(error)}"
    return outcomes


def summary(result: Race, yardsticks: Sequence[str]) -> dict[str, Any]:
    """Rates of every contestant and its ratios to each yardstick, ready for the record."""
    rows: dict[str, Any] = {}
    for name, runs in result.runs.items():
        rows[name] = {
            "rate": spread(run.rate for run in runs).to_dict(),
            "cpu_s_per_unit": spread(run.cpu_s / run.units for run in runs).to_dict(),
            "cpu_over": {o: result.cpu_ratios(name, o).to_dict() for o in yardsticks if o in result.runs},
            "over": {
                other: result.ratios(name, other).to_dict() for other in yardsticks if other in result.runs
            },
        }
    return {"contestants": rows, "missing": result.missing}


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, aligned so that it reads well in a terminal too."""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    out = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    out.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(out)


def rate_table(result: Race, yardsticks: Sequence[str], unit: str) -> str:
    """Contestants from fastest to slowest: rate, and ratio to each yardstick with its spread.

    ``best/best`` compares the fastest rounds: what others do on the machine can only slow a run, so it is the
    steadier number where the spread is wide. So is the CPU time of each unit (the least over the rounds).
    """
    present = [name for name in yardsticks if name in result.runs]
    names = sorted(result.runs, key=lambda name: -spread(run.rate for run in result.runs[name]).median)
    best = {name: max(run.rate for run in runs) for name, runs in result.runs.items()}
    rows = []
    for name in names:
        median = spread(run.rate for run in result.runs[name]).median
        cpu = spread(run.cpu_s / run.units for run in result.runs[name]).low
        row = [name, f"{median:,.0f}", f"{best[name]:,.0f}", f"{1e6 * cpu:,.4g}"]
        for other in present:
            row += [str(result.ratios(name, other)), f"{best[name] / best[other]:.3f}"]
            row.append(str(result.cpu_ratios(name, other)))
        rows.append(row)
    headers = ["", f"{unit}/s", "best", "CPU us each"]
    for name in present:
        headers += [f"x {name}", "best/best", "per CPU s"]
    text = table(headers, rows)
    for name, reason in result.missing.items():
        text += f"\nnot measured: {name}: {reason}"
    return text


def arguments(doc: str, rounds: int = 5) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"alternated rounds (default {rounds})")
    parser.add_argument("--only", default="", help="comma-separated parts of contestants' names")
    parser.add_argument(
        "--no-record", action="store_true", help="print only, write no row to benchmarks/results/"
    )
    return parser


def chosen(contestants: Iterable[Any], only: str) -> list[Any]:
    """Those whose name contains one of the comma-separated parts (all, if there is none)."""
    parts = [part.strip() for part in only.split(",") if part.strip()]
    return [c for c in contestants if not parts or any(part in c.name for part in parts)]


def header(claim: str, configuration: Mapping[str, Any]) -> None:
    """Print what is about to be measured and where."""
    facts = machine()
    print(claim)
    print("configuration:", ", ".join(f"{key}={value}" for key, value in configuration.items()))
    print(
        f"machine: {facts['cpu']}, {facts['cores']} cores, {facts['memory_gb']} GB, "
        f"Python {facts['python']}, load {facts['load_1min']}"
    )
    print("versions:", ", ".join(f"{k} {v}" for k, v in facts["versions"].items()), flush=True)


def compare(
    script: str,
    claim: str,
    configuration: Mapping[str, Any],
    contestants: Iterable[Any],
    check: Callable[[Any], str],
    yardsticks: Sequence[str],
    unit: str,
    options: argparse.Namespace,
) -> None:
    """The whole of a comparison: check every contestant's output once, race those that pass, record.

    Args:
        script: name of the record.
        claim: what is to be shown.
        configuration: of the run, for the record.
        contestants: in the order of the first round.
        check: of a contestant's output; what it returns is printed and recorded, what it raises excludes it.
        yardsticks: names that all others are compared with; the first is the ideal.
        unit: of work.
        options: those of ``arguments``.
    """
    header(claim, configuration)
    entered = chosen(contestants, options.only)
    checks: dict[str, str] = {}
    for contestant in entered:
        checks |= attempt([contestant], check)
        print(f"  check: {contestant.name:<34} {checks[contestant.name]}", flush=True)
    out = {name: text.removeprefix(FAILED) for name, text in checks.items() if text.startswith(FAILED)}
    result = race([c for c in entered if c.name not in out], options.rounds)
    result.missing |= out
    print(rate_table(result, yardsticks, unit))
    if not options.no_record:
        results = {**summary(result, yardsticks), "checks": checks}
        print("recorded in", record(script, claim, configuration, results).name)


def ask(command: Sequence[str], limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Run a child in a session of its own and read its last line.

    Raises:
        RuntimeError: it failed, said nothing that can be read, or took too long; with its reason.
    """
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"not done after {limit_s:g} s") from error
    finally:
        if child.returncode is None:
            # Its workers go with it: they are of its session.
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    try:
        answer = json.loads((out.strip().splitlines() or [""])[-1])
    except json.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        last = (err.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"exit status {child.returncode}: {last}")
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


class Repeat:
    """The items over and over, without keeping a second list of them; every ``iter`` starts anew."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.items
