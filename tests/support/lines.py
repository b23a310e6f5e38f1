"""Runs code line by line, as far as it is the package's, and does something before one of the lines, as a signal would."""

import sys
from functools import cache
from pathlib import Path

import pipegraph as pg

PACKAGE = str(Path(pg.__file__).parent)


@cache
def locking(file):
    """Lines at which no signal is raised: of ``with``, to which Python comes back before a lock's release, and of
    ``try:`` alone, which no handler covers."""
    lines = Path(file).read_text().splitlines()
    return {
        number
        for number, line in enumerate(lines, 1)
        if line.lstrip().startswith("with ") or line.strip() == "try:"
    }


def in_finaliser(frame):
    """Whether Python would print what is raised here, and not raise it."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def before_lines(call, run, only=None):
    """Runs ``run``, and ``call(file, line)`` before each line of the package that this thread executes meanwhile.

    Args:
        only: ``(file, line)`` of the only line for which it is called.
    """

    def trace(frame, event, argument):
        code = frame.f_code
        file = code.co_filename
        if event == "call":
            if only is None:
                traced = file.startswith(PACKAGE)
            else:
                traced = file == only[0] and only[1] >= code.co_firstlineno
            return trace if traced and not in_finaliser(frame) else None
        if (
            event == "line"
            and (only is None or frame.f_lineno == only[1])
            and frame.f_lineno not in locking(file)
        ):
            call(file, frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return run()
    finally:
        sys.settrace(before)


def at_line(number, call, run):
    """Runs ``run``, and ``call()`` before the so-manieth line of the package that this thread executes meanwhile; False if
    it has fewer."""
    left = number

    def count(file, line):
        nonlocal left
        left -= 1
        if left == 0:
            call()

    before_lines(count, run)
    return left <= 0
