"""``pipegraph tune``: run a graph for a while with the tuner, and print the settings that it found."""

from __future__ import annotations

import sys

from pipegraph.cli.profile_command import run_for
from pipegraph.cli.progress_bars import ProgressLine
from pipegraph.graph import Graph


def run_tune(graph: Graph, seconds: float, output: str | None, step_s: float = 0.0) -> None:
    """Iterate ``graph`` over and over for ``seconds`` with ``autotune=True``; prints code for the settings.

    What was tried and why goes to the standard error, so that the code can be sent to a file.

    Args:
        step_s: seconds that a simulated training step takes for each chunk.

    Raises:
        DataError: a whole epoch delivered nothing.
    """
    with graph.loader(output, epochs=None, autotune=True) as loader:
        run_for(loader, seconds, step_s, ProgressLine(f"tuning {graph.name}", quiet=not sys.stdout.isatty()))
    found = loader.tuning()
    print(found.story, file=sys.stderr)
    print(found.code)
