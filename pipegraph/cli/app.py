"""The commands and their options; what they do stands in the modules beside this one."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Annotated

import rich  # noqa: F401  a missing one is reported before any command starts
import typer

from pipegraph.errors import DataError, GraphError, MissingExtraError, PipegraphError, StateError

app = typer.Typer(
    name="pipegraph",
    epilog="Examples:  pipegraph demo  |  pipegraph plan train.py:graph  |  pipegraph doctor",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE:GRAPH",
        help="A Python file, and the name of the graph in it or of a function that returns one. The file is imported: "
        "what it does as a program, such as training, belongs under if __name__ == '__main__'.",
    ),
]


StepMs = Annotated[
    float, typer.Option(min=0.0, help="A simulated training step of this many milliseconds per batch.")
]
Seconds = Annotated[float, typer.Option(min=0.1, max=threading.TIMEOUT_MAX, help="How long to run.")]
Output = Annotated[
    str | None, typer.Option(help="The stage to deliver from, where the graph has several sinks.")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        from pipegraph import __version__

        print(f"pipegraph {__version__}")
        raise typer.Exit


@app.callback()
def pipegraph(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A pipeline-graph data loading framework for PyTorch."""


@app.command(
    epilog="Examples:  pipegraph demo  |  pipegraph demo --data photos/ --epochs 5  |  pipegraph demo --make ."
)
def demo(
    data: Annotated[
        str | None,
        typer.Option(
            help="A folder of class folders, a flat folder of images, or tar shards (a folder, a glob, or "
            "'part-{0000..0099}.tar'). By default drawn shapes."
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data.")] = None,
    make: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Train nothing: draw the files that the documentation's examples read."
        ),
    ] = None,
) -> None:
    """Train a small network on images, stop in the middle, resume, and show the profile."""
    if make is not None:
        from pipegraph.cli.demo import make_files

        print(*make_files(make), sep="\n")
    else:
        from pipegraph.cli.demo import run_demo

        run_demo(data, epochs)


@app.command(epilog="Example:  pipegraph plan train.py:graph")
def plan(graph: Target, output: Output = None) -> None:
    """Check a graph and print what would run: operators, workers, queues, rewrites, decoders. Runs no stage."""
    from pipegraph.cli.commands import load_graph

    print(load_graph(graph).plan(output))


@app.command(
    epilog="Example:  pipegraph profile train.py:graph --seconds 20 --step-ms 120 --report report.html"
)
def profile(
    graph: Target,
    seconds: Seconds = 20.0,
    output: Output = None,
    json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON only.")] = False,
    step_ms: StepMs = 0.0,
    report: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the profile as a page of HTML that opens from disk."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Write a trace for Perfetto: every worker's work, and samples followed."
        ),
    ] = None,
) -> None:
    """Run a graph without training and print the throughput of every stage and the bottleneck."""
    from pipegraph.cli.commands import load_graph, run_profile

    run_profile(load_graph(graph), seconds, output, json, step_ms / 1000, report, trace)


@app.command(epilog="Example:  pipegraph tune train.py:graph --seconds 30 --step-ms 120")
def tune(
    graph: Target,
    seconds: Seconds = 30.0,
    output: Output = None,
    step_ms: StepMs = 0.0,
) -> None:
    """Find workers and queue lengths, and print them as code to paste behind the graph."""
    from pipegraph.cli.commands import load_graph, run_tune

    run_tune(load_graph(graph), seconds, output, step_ms / 1000)


@app.command(epilog="Example:  pipegraph index 'data/train-*.tar' --out train.manifest.json")
def index(
    parts: Annotated[list[str], typer.Argument(help="Shards: files, folders, globs, brace ranges, URLs.")],
    out: Annotated[
        str | None,
        typer.Option(
            help="The manifest to write: a file, or a URL.",
            show_default="_manifest.json beside the shards, where graphs look for it",
        ),
    ] = None,
    checksums: Annotated[bool, typer.Option(help="Read every byte for checksums.")] = True,
    block_size: Annotated[
        str | None,
        typer.Option(
            help="About how large blocks are, such as '64 MB'.",
            show_default="8 MB, more for datasets above 8 TB",
        ),
    ] = None,
) -> None:
    """Index shards once, so that any order over them can start at any sample."""
    from pipegraph.cli.commands import run_index

    run_index(parts, out, checksums, block_size)


@app.command(
    epilog="Examples:  pipegraph pack photos/ shards/  |  pipegraph pack photos/ shards/ --format parquet  |  "
    "pipegraph pack convert.py:samples shards/  |  pipegraph pack sorted/ shuffled/ --shuffle"
)
def pack(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder of files (those of a sample share their name up to the first dot; class folders give "
            "labels), or FILE.py:FUNCTION, which returns a dataset or yields dicts."
        ),
    ],
    target: Annotated[str, typer.Argument(help="The folder for the shards and their manifest.")],
    format: Annotated[str, typer.Option(help="tar or parquet: see docs/formats.md.")] = "tar",
    size: Annotated[str, typer.Option(help="About how large shards are, such as '128MB'.")] = "128MB",
    shuffle: Annotated[
        bool,
        typer.Option("--shuffle", help="Write the samples in a random order, for data that is sorted."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the shuffle.")] = 0,
) -> None:
    """Write a dataset as shards. A stopped run resumes; the shards are the same however often it was stopped."""
    from pipegraph.cli.commands import run_pack

    run_pack(source, target, format, size, shuffle, seed)


@app.command(epilog="Example:  pipegraph doctor")
def doctor() -> None:
    """What this machine offers: cores, memory, devices, decoders, and the install line of each missing part."""
    from pipegraph.cli.doctor import report

    print(report())


# typer before 0.26 raises click's exceptions, later ones their own copies: both are found from this class.
_USAGE_ERROR = typer.BadParameter.__mro__[1]


INTERRUPTED = 130


def run(arguments: Sequence[str]) -> int:
    """Run a command; returns the exit code."""
    command = typer.main.get_command(app)
    resumes = arguments and arguments[0] == "pack"
    interrupted = "interrupted; the same command continues" if resumes else "interrupted"
    try:
        code = command.main(list(arguments), prog_name="pipegraph", standalone_mode=False)
        # typer turns a Ctrl-C inside a command into the exit code that it returns.
        return _fail(interrupted, INTERRUPTED) if code == INTERRUPTED else code or 0
    except typer.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _fail(interrupted, INTERRUPTED)
    except BrokenPipeError:
        # `pipegraph plan ... | head`: nobody reads on. What is left in the buffer must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (GraphError, StateError, DataError, MissingExtraError) as error:
        return _fail(_line(error), 2)
    except PipegraphError as error:
        return _fail(_line(error), 1)
    except Exception as error:
        if isinstance(error, _USAGE_ERROR):
            if not arguments:
                return 2  # the help was printed
            return _fail(f"{error.format_message()} See pipegraph --help.", 2)  # type: ignore[attr-defined]
        frame = traceback.extract_tb(error.__traceback__)[-1]  # most often in a function of the user's
        place = f"{os.path.relpath(frame.filename)}:{frame.lineno}"
        return _fail(f"{type(error).__name__} at {place}: {_line(error)}", 1)


def _line(error: BaseException) -> str:
    """The message and its notes in one line."""
    notes = getattr(error, "__notes__", ())
    return " ".join(" ".join([str(error), *(f"({note})" for note in notes)]).split())


def _fail(message: str, code: int) -> int:
    if message:
        print(f"pipegraph: {message}", file=sys.stderr)
    return code
