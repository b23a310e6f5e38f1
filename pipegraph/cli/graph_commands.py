"""``pipegraph plan | profile | tune``: what a graph would run, and how fast it runs."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from time import perf_counter

from pipegraph.cli.progress_bars import ProgressLine
from pipegraph.errors import DataError, LoaderClosedError
from pipegraph.graph import Graph
from pipegraph.loader.loader import Loader
from pipegraph.paths import write_text
from pipegraph.planning.drawing import plan_svg


def run_plan(graph: Graph, output: str | None, svg: str | None) -> None:
    """Print the plan, and write its picture to ``svg``."""
    plan = graph.plan(output)
    print(plan)
    if svg is not None:
        write_text(Path(svg), plan_svg(plan))
        print(f"picture: {svg}")


def run_profile(graph: Graph, seconds: float, output: str | None, as_json: bool, step_s: float) -> None:
    """Run the graph for some seconds and print its profile; ``step_s`` is the time of a simulated training step."""
    with graph.loader(output, epochs=None) as loader:
        _run_for(loader, seconds, step_s, ProgressLine(f"profiling {graph.name}", quiet=as_json))
    found = loader.profile()
    print(found.to_json(indent=2) if as_json else found)


def run_tune(graph: Graph, seconds: float, output: str | None, step_s: float = 0.0) -> None:
    """Iterate ``graph`` over and over for ``seconds`` with ``autotune=True``; prints code for the settings.

    What was tried and why goes to the standard error, so that the code can be sent to a file.
    """
    with graph.loader(output, epochs=None, autotune=True) as loader:
        _run_for(loader, seconds, step_s, ProgressLine(f"tuning {graph.name}", quiet=not sys.stdout.isatty()))
    found = loader.tuning()
    print(found.story, file=sys.stderr)
    print(found.code)


def _run_for(loader: Loader, seconds: float, step_s: float, progress: ProgressLine) -> None:
    """Iterate a loader over and over for ``seconds``, ``step_s`` of them for each chunk; closes it then."""
    over = threading.Event()

    def stop() -> None:
        over.set()
        loader.close()

    # Not a check per batch: a stalled pipeline must be reported too.
    clock = threading.Timer(seconds, stop)
    clock.daemon = True
    clock.name = "pipegraph-profile-clock"
    started = perf_counter()
    clock.start()
    try:
        with progress:
            progress.start("running", seconds, unit="s")
            while not over.is_set():
                before = loader.profile().items
                for chunk in loader.chunks():
                    progress.advance(perf_counter() - started, len(chunk))
                    if step_s:
                        over.wait(step_s)
                if loader.profile().items == before:
                    raise DataError(f"graph {loader.plan.graph_name!r} delivered nothing in a whole epoch")
    except LoaderClosedError:
        if not over.is_set():
            raise
    finally:
        clock.cancel()
        if clock.is_alive():
            clock.join()
