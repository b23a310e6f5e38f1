"""The live view in a terminal, in a pipe, and beside the training loop's own output."""

import io
import re
import threading

import pytest
from rich.console import Console

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.profile.live import Live

HOSTILE = "a stage [bold]with markup[/bold] :smile: and a name that is far too long"


def graph(items=40):
    made = pg.Graph("live")
    source = made.add(ops.FromSequence(range(items)), name="source")
    source.then(lambda x: x, name=HOSTILE).then(ops.Batch(4), name="batch")
    return made


def console(width=80, terminal=True):
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=width, highlight=False, legacy_windows=False
    )


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_it_shows_progress_and_every_stage_within_eighty_columns():
    screen = console()
    with graph().loader() as loader:
        assert len(list(Live(loader, screen))) == 10
    shown = plain(screen.file.getvalue()).replace("\r", "\n")
    assert "epoch 0, 10/10" in shown
    assert "a stage [bold]" in shown
    assert all(len(each) <= 80 for each in shown.splitlines())
    assert not any(thread.name == "pipegraph-live" for thread in threading.enumerate())


def test_several_epochs_in_one_block_and_an_exception_inside():
    screen = console()
    with pytest.raises(KeyError, match="mine"), graph().loader() as loader, Live(loader, screen):
        for _ in range(2):
            list(loader)
        raise KeyError("mine")
    assert "epoch 1, 10/10" in plain(screen.file.getvalue())
    assert not any(thread.name == "pipegraph-live" for thread in threading.enumerate())


def test_a_pipe_gets_the_view_at_the_end_and_the_programs_output_stays_apart(programs):
    program = (
        "import pipegraph as pg\nfrom pipegraph import operators as ops\n"
        "graph = pg.Graph('piped')\ngraph.add(ops.FromIterable(range(20)), name='source')\n"
        "with graph.loader() as loader:\n    print(sum(pg.live(loader)))\n"
    )
    done = programs.run(program)
    assert done.stdout == "190\n"
    assert done.stderr.startswith("epoch 0, 20/20, ") and done.stderr.count("source") == 1
