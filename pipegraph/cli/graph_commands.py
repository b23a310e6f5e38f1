"""``pipegraph plan | profile | tune`` of a graph that a Python file makes: what it would run, and how fast it runs."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

from pipegraph.cli.progress_bars import ProgressLine
from pipegraph.errors import DataError, GraphError, LoaderClosedError
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
    """Iterate ``graph`` over and over for ``seconds``, then print its profile."""
    with (
        graph.loader(output, epochs=None) as loader,
        record(loader, report=report, trace=trace, every=EVERY_S),
    ):
        _run_for(loader, seconds, step_s, ProgressLine(f"profiling {graph.name}", quiet=as_json))
    found = loader.profile()
    print(found.to_json(indent=2) if as_json else found)
    for what, path in (("report", report), ("trace", trace)):
        if path is not None:
            print(f"{what}: {path}", file=sys.stderr)


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
            progress.start("running", seconds, unit="samples")
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


def load_graph(target: str) -> Graph:
    """The graph that ``train.py:graph`` names; a function without arguments is called for it."""
    found = load_object(target)
    if not isinstance(found, Graph):
        raise GraphError(
            f"{target} is of type {type(found).__name__}, no graph and no function that returns one"
        )
    return found


def load_object(target: str) -> Any:
    """What ``FILE:NAME`` names; a function without arguments is called for it.

    Raises:
        GraphError: there is no such file, or no such name in it.
    """
    file, _, name = target.rpartition(":")
    if not file or not name:
        raise GraphError(f"expected a Python file and a name in it, such as train.py:graph, got {target!r}")
    path = Path(file)
    if not path.is_file():
        raise GraphError(f"there is no file {file!r}")
    # Under its own name, as if imported from its folder, so that what it imports beside it is found.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise GraphError(f"{file!r} is not a Python file (.py)")
    sys.path.insert(0, str(path.resolve().parent))
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise GraphError(f"{file} has no {name!r}")
    found = getattr(module, name)
    return found() if callable(found) else found
