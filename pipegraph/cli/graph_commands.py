"""``pipegraph plan | profile | tune`` of a graph that a Python file makes: what it would run, and how fast it runs."""

from __future__ import annotations

import importlib.util
import sys
import threading
import traceback
from pathlib import Path
from time import perf_counter
from types import FunctionType, ModuleType
from typing import Any

from pipegraph.cli.progress_bars import ProgressLine
from pipegraph.errors import DataError, GraphError, LoaderClosedError, described
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
    """The graph that ``train.py:graph`` names, or the only one in ``train.py``; a function without arguments is called
    for it."""
    if target.endswith(".py"):
        graphs = _named(_run(Path(target)), Graph)
        different = {id(graph) for graph in graphs.values()}
        if len(different) != 1:
            raise GraphError(
                f"{target} has {len(different)} graphs: {', '.join(graphs) or 'none'}; say which, or which function "
                f"returns it: {target}:{next(iter(graphs), 'FUNCTION')}"
            )
        return next(iter(graphs.values()))  # type: ignore[no-any-return]
    found = load_object(target, Graph)
    if not isinstance(found, Graph):
        raise GraphError(
            f"{target} is of type {type(found).__name__}, no graph and no function that returns one"
        )
    return found


def load_object(target: str, kind: type | None = None) -> Any:
    """What ``FILE:NAME`` names; a function without arguments is called for it.

    Args:
        kind: what is looked for: something of it is never called, and others of it are named in the error.

    Raises:
        GraphError: the file cannot be found or run, or has no such name, or the function fails.
    """
    file, colon, name = target.rpartition(":")
    if not colon or not file or not name:
        raise GraphError(f"expected a Python file and a name in it, such as train.py:graph, got {target!r}")
    module = _run(Path(file))
    if not hasattr(module, name):
        there = ", ".join([*_named(module, kind or FunctionType), *_named(module, FunctionType)])
        raise GraphError(f"{file} has no {name!r}; it has {there or 'nothing of the kind'}")
    found: Any = getattr(module, name)
    if callable(found) and not (kind is not None and isinstance(found, kind)):
        try:
            found = found()
        except Exception as error:
            raise GraphError(f"{target}() failed: {_where(error, file)}") from error
    return found


def _named(module: ModuleType, kind: type) -> dict[str, Any]:
    """What the file itself has of a kind: functions that it imports are none of its own."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, kind) and getattr(value, "__module__", "") in (module.__name__, kind.__module__)
    }


def _run(path: Path) -> ModuleType:
    if not path.is_file():
        raise GraphError(f"there is no file {str(path)!r}")
    # Under its own name, as if imported from its folder, so that what it imports beside it is found.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise GraphError(f"{str(path)!r} is not a Python file (.py)")
    sys.path.insert(0, str(path.resolve().parent))
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise GraphError(f"{path} could not be run: {_where(error, str(path))}") from error
    return module


def _where(error: BaseException, file: str) -> str:
    text = described(error)
    wanted = str(Path(file).resolve())
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename and str(Path(frame.filename).resolve()) == wanted
    ]
    return f"{text} (line {lines[-1]})" if lines else text
