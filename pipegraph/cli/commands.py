"""What commands do: ``plan | profile | tune`` of a graph that a Python file makes, ``index`` and ``pack`` of shards.

A progress bar stands where the output is a terminal; lines of what is said everywhere.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pipegraph.errors import DataError, GraphError, LoaderClosedError
from pipegraph.graph import Graph
from pipegraph.reader.manifests import manifest_beside
from pipegraph.storage import build_manifest
from pipegraph.storage.indexing import IndexProgress
from pipegraph.storage.parts import MANIFEST, expand_parts, is_url
from pipegraph.storage.stores import StoreClient, safe_url
from pipegraph.storage.writing.pack import PackProgress, pack_shards
from pipegraph.units import counted, format_bytes, parse_bytes

if TYPE_CHECKING:
    from pipegraph.loader.loader import Loader


class ProgressLine(Progress):
    """Tasks one after another; each counts to its total and shows samples per second."""

    def __init__(self, title: str = "", quiet: bool = False, console: Console | None = None) -> None:
        console = console or Console(quiet=quiet, highlight=False)
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[note]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._name = self._unit = ""
        self._samples = self._done = 0
        self._since = 0.0
        if title:
            self.say(title)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)

    def begin(self, name: str, total: float, unit: str = "images", done: float = 0.0) -> None:
        """Begin a task of ``total`` units of work, ``done`` of which are done."""
        self._name, self._unit, self._samples, self._since = name, unit, 0, perf_counter()
        for task in self.task_ids:
            self.remove_task(task)
        self.add_task(name, total=total, completed=done, note="")  # type: ignore[arg-type]

    def reach(self, done: float, samples: int, note: str = "") -> None:
        """``done`` units are done by now, with ``samples`` more."""
        self._samples += samples
        rate = self._samples / max(perf_counter() - self._since, 1e-9)
        self.update(self.task_ids[0], completed=done, note=f"{rate:,.0f} {self._unit}/s  {note}")

    def count(self, name: str, done: int, total: int, note: str, unit: str = "shards") -> None:
        """``done`` units of a job are there."""
        if name == self._name:
            self.reach(done, done - self._done, note)
        else:
            self.begin(name, total, unit, done)
        self._done = done


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
    from pipegraph.profile.record import record

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
            progress.begin("running", seconds, unit="samples")
            while not over.is_set():
                before = loader.profile().items
                for chunk in loader.chunks():
                    progress.reach(perf_counter() - started, len(chunk))
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


def run_index(parts: Sequence[str], out: str | None, checksums: bool, block_size: str | None) -> None:
    """See ``pipegraph index --help``. Shards that lie in several folders, or come over HTTP, have their manifest in the
    current folder."""
    block_nbytes = None if block_size is None else parse_bytes(block_size, "--block-size")
    with contextlib.ExitStack() as stack:
        client = None
        if any(map(is_url, [out or "", *parts])):
            client = stack.enter_context(StoreClient())
        found = expand_parts(parts, store=client)
        if out is None:
            out = manifest_beside(found)
            if out is None or out.startswith(("http://", "https://")):
                out = MANIFEST
        progress = stack.enter_context(ProgressLine())

        def show(state: IndexProgress) -> None:
            progress.count("indexing", state.parts_done, state.parts, f"{state.samples:,} samples")

        manifest = build_manifest(
            found, out, store=client, checksums=checksums, block_nbytes=block_nbytes, progress=show
        )
    size = format_bytes(manifest.nbytes)
    samples, shards = counted(len(manifest), "sample"), counted(len(manifest.parts), "shard")
    print(f"{samples} in {shards} ({size}): wrote {safe_url(out)}")


def run_pack(source: str, target: str, format: str, size: str, shuffle: bool, seed: int) -> None:
    """Pack ``source`` into the folder ``target``; a run that was stopped resumes."""
    complete = Path(target, MANIFEST).is_file()  # written last: then nothing more is
    with ProgressLine() as progress:

        def report(state: PackProgress) -> None:
            shards = counted(state.shards, "shard")
            if state.total is None:
                progress.say(f"{shards}, {state.samples:,} samples")
            else:
                progress.count("packing", state.samples, state.total, shards, "samples")

        manifest = pack_shards(
            _source(source),
            target,
            format=format,
            size=size,
            shuffle=seed if shuffle else None,
            progress=report,
        )
    size_text = format_bytes(manifest.nbytes)
    samples, shards = counted(len(manifest), "sample"), counted(len(manifest.parts), "shard")
    print(f"{samples} in {shards} ({size_text}): {target}{' was complete, nothing was written' * complete}")


def _source(text: str) -> Any:
    """A place as it is; ``FILE:FUNCTION`` as what the function returns."""
    file, colon, _ = text.rpartition(":")
    if not colon or not file.endswith(".py"):
        return text
    found = load_object(text)
    if isinstance(found, Graph):
        raise GraphError(
            f"{text} is a graph; give a function that yields samples, such as one with "
            "`with graph.loader() as loader: yield from loader`"
        )
    return found
