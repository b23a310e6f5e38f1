"""What every benchmark shares: alternated runs, ratios with their spread, and one dated record per run.

A ``Contestant`` opens a stream that is longer than what is timed. The harness draws ``warm`` items from it (buffers
full, workers up), times the next ``timed`` ones, and closes it while more would follow. So start-up and drain are
outside the measured span, and a deep buffer earns nothing. A ``Way`` delivers one whole epoch, and a ``Child`` is
measured in an interpreter of its own.

One round lets every contestant run once; the rounds are repeated, each starting with the next contestant. Only ratios
*within* one round are meaningful on a machine that others use too: the table gives their median, least and greatest
over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import resource
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

from records import RESULTS as RESULTS, machine as machine, record as record
from tables import comparison, table as table

FAILED = "failed: "
LIMIT_S = 300
"""A child that takes longer is ended with all its processes, and named."""

Measures = dict[str, float]
"""What one run found: ``rate`` (more is better), and quantities of which less is better."""


def run(wall_s: float, cpu_s: float, units: float) -> Measures:
    """Of a timed span: wall seconds, and CPU seconds of this process and its descendants."""
    return {"rate": units / wall_s, "cpu_s_per_unit": max(cpu_s, 1e-9) / units}


@dataclass(frozen=True)
class Contestant:
    """One way to do the job, as a stream of items; leaving its context ends its threads and processes."""

    name: str
    stream: Callable[[], AbstractContextManager[Iterable[Any]]]
    warm: int  # items drawn before the clock starts
    timed: int  # items drawn while it runs (a slow contestant takes fewer)
    weight: float = 1.0  # units of work in one item (for example images in a batch)

    def measure(self) -> Measures:
        """Open, warm up, time and close.

        Raises:
            RuntimeError: the stream ended before the timed span did.
        """
        gc.collect()
        with self.stream() as stream:
            items = iter(stream)
            drawn = sum(1 for _ in islice(items, self.warm))
            clock = Clock()
            # Drawn at C speed and only the last kept: the consumer costs next to nothing.
            tail = deque(enumerate(islice(items, self.timed), 1), maxlen=1)
            wall_s, cpu_s = clock.read()
            drawn += tail[0][0] if tail else 0
            tail.clear()
            # The stream's own iterator goes first, as at the end of a user's loop.
            del items
        if drawn < self.warm + self.timed:
            raise RuntimeError(f"{self.name}: the stream ended after {drawn} items, inside the timed span")
        return run(wall_s, cpu_s, self.timed * self.weight)


@dataclass(frozen=True)
class Way:
    """One way to do a whole job: ``epoch()`` delivers all of its ``rows`` once, from start to end."""

    name: str
    epoch: Callable[[], Any]
    rows: int

    def measure(self) -> Measures:
        gc.collect()
        ended, clock = _of_ended_children(), Clock()
        self.epoch()
        wall_s, cpu_s = clock.read()
        return run(wall_s, cpu_s + _of_ended_children() - ended, self.rows)


def _of_ended_children() -> float:
    """CPU seconds of worker processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class Child:
    """What a fresh interpreter measures: it runs ``command`` and prints the measures as JSON on its last line."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    def measure(self) -> Measures:
        return ask([sys.executable, *self.command], environment=self.environment)


def answer(measured: Callable[[], Measures]) -> None:
    """The other side of a ``Child``: measure, and print what was found or why not."""
    try:
        found: dict[str, Any] = measured()
    except Exception as error:
        found = {"error": reason(error)}
    print(json.dumps(found), flush=True)


def ask(
    command: Sequence[str], limit_s: float = LIMIT_S, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a child in a session of its own and read its last line.

    Raises:
        RuntimeError: it failed, said nothing that can be read, or took too long; with its reason.
    """
    # Compiled modules are kept, as in any installed package: the first, unmeasured run writes them.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**kept, **(environment or {})},
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
        found = json.loads((out.strip().splitlines() or [""])[-1])
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        last = (err.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"exit status {child.returncode}: {last}")
    if "error" in found:
        raise RuntimeError(found["error"])
    return found


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least and greatest of at least one value, rounded to four digits."""
    ordered = sorted(values)
    found = {"median": statistics.median(ordered), "low": ordered[0], "high": ordered[-1]}
    return {key: float(f"{value:.4g}") for key, value in found.items()}


class Clock:
    """Wall time, and CPU time of this process and of those of its descendants that live at the end, since it began."""

    def __init__(self) -> None:
        self._cpu, self._begun = cpu_seconds(), time.perf_counter()

    def read(self) -> tuple[float, float]:
        """(wall, CPU) in seconds; what a process that has ended meanwhile used is left out."""
        wall_s = time.perf_counter() - self._begun
        return wall_s, sum(spent - self._cpu.get(process, 0.0) for process, spent in cpu_seconds().items())


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


@dataclass
class Race:
    """All runs of one comparison: ``runs[name][r]`` is round r; ``missing[name]`` says why one has none."""

    runs: dict[str, list[Measures]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def ratios(self, name: str, over: str, measure: str) -> dict[str, float]:
        """How many times as good, round by round: more of the rate, or less of anything else."""
        pairs = zip(self.runs[name], self.runs[over], strict=True)
        sign = 1 if measure == "rate" else -1
        return spread((a[measure] / b[measure]) ** sign for a, b in pairs)

    def summary(self, yardsticks: Sequence[str]) -> dict[str, Any]:
        """Measures of every contestant and its ratios to each yardstick, ready for the record."""
        rows: dict[str, Any] = {}
        for name, runs in self.runs.items():
            rows[name] = {key: spread(one[key] for one in runs) for key in runs[0]}
            if "rate" in runs[0]:
                others = [other for other in yardsticks if other in self.runs]
                rows[name]["over"] = {other: self.ratios(name, other, "rate") for other in others}
                rows[name]["cpu_over"] = {o: self.ratios(name, o, "cpu_s_per_unit") for o in others}
        return {"contestants": rows, "missing": self.missing}


def race(contestants: Sequence[Any], rounds: int) -> Race:
    """Run all contestants in turn, ``rounds`` times; one that fails is left out and its reason kept."""
    result = Race()
    entered = list(contestants)
    for number in range(rounds):
        shift = number % len(entered) if entered else 0
        for contestant in entered[shift:] + entered[:shift]:
            try:
                found = contestant.measure()
                result.runs.setdefault(contestant.name, []).append(found)
                said = ", ".join(f"{key} {value:,.4g}" for key, value in found.items())
            except Exception as error:
                result.missing[contestant.name] = said = reason(error)
                if not isinstance(error, ImportError | RuntimeError):
                    traceback.print_exc()
            print(f"  round {number + 1}: {contestant.name:<34} {said}", file=sys.stderr, flush=True)
        entered = [contestant for contestant in entered if contestant.name not in result.missing]
    for name in result.missing:
        result.runs.pop(name, None)
    return result


def reason(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def arguments(doc: str | None, rounds: int = 5, images: bool = False) -> argparse.ArgumentParser:
    """The options that every benchmark has; ``--images FOLDER`` is by default what ``PIPEGRAPH_TEST_IMAGES`` names."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"alternated rounds (default {rounds})")
    parser.add_argument("--only", default="", help="comma-separated parts of contestants' names")
    parser.add_argument(
        "--no-record", action="store_true", help="print only, write no row to benchmarks/results/"
    )
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)  # the script's own use
    if images:
        there = os.environ.get("PIPEGRAPH_TEST_IMAGES")
        parser.add_argument(
            "--images", default=there, help="folder of photographs (default: PIPEGRAPH_TEST_IMAGES)"
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


def contest(
    contestants: Iterable[Any],
    check: Callable[[Any], str],
    yardsticks: Sequence[str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Check every contestant's output once, race those that pass, print the table; the results for the record.

    What ``check`` returns is printed and recorded, what it raises excludes the contestant. All others are compared with
    the yardsticks; the first is the ideal.
    """
    checks: dict[str, str] = {}
    entered = []
    for contestant in chosen(contestants, options.only):
        try:
            checks[contestant.name] = check(contestant)
            entered.append(contestant)
        except Exception as error:
            checks[contestant.name] = f"{FAILED}{reason(error)}"
        print(f"  check: {contestant.name:<34} {checks[contestant.name]}", flush=True)
    result = race(entered, options.rounds)
    result.missing |= {n: said.removeprefix(FAILED) for n, said in checks.items() if said.startswith(FAILED)}
    found = {**result.summary(yardsticks), "checks": checks}
    if result.runs:
        print(comparison(found["contestants"]))
    for name, why in result.missing.items():
        print(f"not measured: {name}: {why}")
    print(flush=True)
    return found


def once(contestant: Any) -> str:
    """The check of one that checks itself: an unmeasured run, which also writes compiled modules."""
    contestant.measure()
    return "runs"


def keep(
    script: str,
    claim: str,
    configuration: Mapping[str, Any],
    results: Mapping[str, Any],
    options: argparse.Namespace,
) -> None:
    """Write the record, unless the options say not to."""
    if not options.no_record:
        print("recorded in", record(script, claim, configuration, results).name)


def compare(
    script: str,
    claim: str,
    configuration: Mapping[str, Any],
    contestants: Iterable[Any] | Mapping[str, Iterable[Any]],
    check: Callable[[Any], str],
    yardsticks: Sequence[str],
    options: argparse.Namespace,
) -> None:
    """The whole of a benchmark: one ``contest``, or several by a parameter, and one record."""
    configuration = {**configuration, "rounds": options.rounds}
    header(claim, configuration)
    results: dict[str, Any] = {}
    if isinstance(contestants, Mapping):
        for part, entered in contestants.items():
            print(f"\n{part}")
            results[part] = contest(entered, check, yardsticks, options)
    else:
        results = contest(contestants, check, yardsticks, options)
    keep(script, claim, configuration, results, options)


@contextlib.contextmanager
def loaded(node: Any, key: str = "", **options: Any) -> Iterator[Any]:
    """What the graph of a node delivers, or one entry of each batch."""
    with node.graph.loader(**options) as loader:
        yield (batch[key] for batch in loader) if key else loader


class Repeat:
    """The items over and over, without keeping a second list of them; every ``iter`` starts anew."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.items
