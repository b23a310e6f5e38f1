"""``pipegraph profile``: run a graph for a while without a training loop."""

from __future__ import annotations

import threading
from time import perf_counter

from pipegraph.cli.progress_bars import ProgressLine
from pipegraph.errors import DataError, LoaderClosedError
from pipegraph.graph import Graph
from pipegraph.loader.loader import Loader
from pipegraph.profile.record import record

EVERY_S = 0.5
"""Between two moments of the report's charts."""


def run_profile(
    graph: Graph,
    seconds: float,
    output: str | None,
    as_json: bool,
    step_s: float = 0.0,
    report: str | None = None,
    trace: str | None = None,
) -> None:
    """Iterate ``graph`` over and over for ``seconds``, then print its profile.

    Args:
        step_s: seconds that a simulated training step takes for each chunk.
        report: where to write the HTML report.
        trace: where to write a trace for Perfetto.

    Raises:
        DataError: a whole epoch delivered nothing.
        MissingExtraError: the report needs a package that is not installed.
    """
    with (
        graph.loader(output, epochs=None) as loader,
        record(loader, report=report, trace=trace, every=EVERY_S),
    ):
        run_for(loader, seconds, step_s, ProgressLine(f"profiling {graph.name}", quiet=as_json))
    found = loader.profile()
    print(found.to_json(indent=2) if as_json else found)


def run_for(loader: Loader, seconds: float, step_s: float, progress: ProgressLine) -> None:
    """Iterate a loader over and over for ``seconds``; closes it then.

    Raises:
        DataError: a whole epoch delivered nothing.
    """
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
