"""The command line: ``pipegraph demo | plan | profile | tune | index | pack | doctor``.

Exit codes: 0; 1 where the pipeline or the machine failed; 2 for bad input, reported in one line; 130 after Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Never prints a traceback for bad input."""
    from pipegraph.errors import MissingExtraError

    try:
        from pipegraph.cli.app import run
    except ImportError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(
            f"pipegraph: {MissingExtraError.of(error, error.name, 'cli', 'the command line')}",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("pipegraph: interrupted", file=sys.stderr)
        return 130
    return run(sys.argv[1:] if arguments is None else list(arguments))
