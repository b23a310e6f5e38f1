"""Contestants of other environments: packages that cannot be installed beside the rest are measured by an
interpreter of their own, in the same alternated rounds.

The other interpreter starts the same script with its own arguments and ``--child NAME --ask check|run``,
and prints one JSON object as its last line of standard output:

- ``{"check": TEXT, "versions": {...}}`` what its output looks like, and with which packages;
- ``{"wall_s": ..., "cpu_s": ..., "units": ...}`` one timed span, start-up outside as everywhere;
- ``{"error": TEXT}`` why it could not.

Beside its contestants every environment runs the yardstick (the hand-written loop) itself: what another
version of torch, numpy or OpenCV is worth shows there, and is not put down to the peer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

LIMIT_S = 300
"""A child that takes longer is ended with all its processes, and named."""


@dataclass(frozen=True)
class Elsewhere:
    """A contestant of another interpreter.

    Attributes:
        name: how the tables call it.
        asked: how the script calls it over there.
        environment: where it runs, as the tables call it.
        command: interpreter, script and arguments, without the question.
    """

    name: str
    asked: str
    environment: str
    command: tuple[str, ...]

    def measure(self) -> harness.Run:
        """One timed span in a fresh process.

        Raises:
            RuntimeError: it could not, and why.
        """
        answer = ask([*self.command, "--child", self.asked, "--ask", "run"])
        return harness.Run(answer["wall_s"], answer["cpu_s"], answer["units"])

    def check(self) -> str:
        """What its output looks like, and the versions that differ from those here.

        Raises:
            RuntimeError: it could not, and why.
        """
        answer = ask([*self.command, "--child", self.asked, "--ask", "check"])
        here = harness.versions()
        other = [f"{name} {v}" for name, v in answer["versions"].items() if here.get(name) != v]
        return f"{answer['check']} ({self.environment}: {', '.join(other) or 'as here'})"


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


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--other PYTHON`` for the user; the other two for the script itself."""
    parser.add_argument(
        "--other",
        action="append",
        default=[],
        metavar="PYTHON",
        help="another interpreter, for peers that are not installed here (may be repeated)",
    )
    parser.add_argument("--child", default="", help="(the script's own use) one contestant, in this process")
    parser.add_argument("--ask", default="run", choices=("check", "run"), help="(the script's own use)")


def answer(
    contestants: Sequence[harness.Contestant], check: Callable[[Any], str], name: str, question: str
) -> None:
    """The child's part: do it, print JSON."""
    try:
        contestant = next(c for c in contestants if c.name == name)
        found: dict[str, Any]
        if question == "check":
            found = {"check": check(contestant), "versions": harness.versions()}
        else:
            found = vars(contestant.measure())
    except Exception as error:
        found = {"error": harness.reason(error)}
    print(json.dumps(found), flush=True)


def importable(python: str, module: str) -> bool:
    """Whether an interpreter has a module."""
    program = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", program], capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise SystemExit(f"--other {python}: {error}") from error


def enter(
    script: str, arguments: Sequence[str], needs: Mapping[str, str], yardstick: str, others: Sequence[str]
) -> tuple[list[Elsewhere], dict[str, list[str]], dict[str, str]]:
    """Contestants that run elsewhere, one yardstick before those of each environment.

    Args:
        script: to be started there.
        arguments: that it needs there.
        needs: the module that a contestant needs, by the contestant's name.
        yardstick: name of the contestant that every environment runs too.
        others: interpreters, in order of preference.

    Returns:
        The contestants; names in the tables by environment, the yardstick's first; and for those that can
        run neither here nor elsewhere the reason. Those that can run here are in none of them.
    """
    entered: list[Elsewhere] = []
    environments: dict[str, list[str]] = {}
    missing: dict[str, str] = {}
    for name, module in needs.items():
        if importable(sys.executable, module):
            continue
        python = next((other for other in others if importable(other, module)), None)
        if python is None:
            missing[name] = f"{module} is installed neither here nor in an --other interpreter"
            continue
        # Not resolved: an environment's interpreter is a link to the one it was made with.
        environment = Path(python).absolute().parent.parent.name.removeprefix(".venv-")
        command = (python, script, *arguments)
        if environment not in environments:
            shown = f"{yardstick} ({environment})"
            environments[environment] = [shown]
            entered.append(Elsewhere(shown, yardstick, environment, command))
        environments[environment].append(name)
        entered.append(Elsewhere(name, name, environment, command))
    return entered, environments, missing
