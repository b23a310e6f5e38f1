"""The live view in a terminal, in a pipe, and beside the training loop's own output."""

import dataclasses
import io
import re
import threading

import pytest
from rich.console import Console

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.profile.live import Live, line, queue_bar
from pipegraph.units import shorten

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


def test_a_narrow_terminal_still_shows_names_and_rates():
    screen = console(width=40)
    with graph().loader() as loader, Live(loader, screen):
        list(loader)
    shown = plain(screen.file.getvalue()).replace("\r", "\n")
    assert all(len(each) <= 40 for each in shown.splitlines())
    assert "a sta" in shown and "batch" in shown


def test_several_epochs_in_one_block_and_an_exception_inside():
    screen = console()
    with pytest.raises(KeyError, match="mine"), graph().loader() as loader, Live(loader, screen):
        for _ in range(2):
            list(loader)
        raise KeyError("mine")
    assert "epoch 1, 10/10" in plain(screen.file.getvalue())
    assert not any(thread.name == "pipegraph-live" for thread in threading.enumerate())


def test_a_pipe_gets_plain_lines_and_the_programs_output_stays_apart(programs):
    program = (
        "import pipegraph as pg\nfrom pipegraph import operators as ops\n"
        "graph = pg.Graph('piped')\ngraph.add(ops.FromIterable(range(20)), name='source')\n"
        "with graph.loader() as loader:\n    print(sum(pg.live(loader)))\n"
    )
    done = programs.run(program)
    assert done.stdout == "190\n"
    assert re.fullmatch(r"done: [\d,]+ samples/s, waited \d+ %(, \w+ sets the pace)?\n", done.stderr)


def test_a_run_that_was_too_short_names_nobody_beside_a_high_wait():
    with graph(4).loader() as loader:
        list(loader)
        profile = dataclasses.replace(loader.profile(), elapsed_s=0.01, stall_s=0.0099)
    assert line(profile, "done: ").endswith("samples/s, waited 99 %")
    assert "sets the pace" not in repr(profile) and "too briefly" in profile.conclusion
    longer = dataclasses.replace(profile, elapsed_s=1.0, stall_s=0.0, bottleneck="consumer")
    assert line(longer).endswith("waited 0 %, training sets the pace")


def test_bars_and_names_are_cut_to_size():
    full = pg.Profile(
        {}, "consumer", 0.0, 0.0, (), channels=(pg.types.ChannelProfile("a", "b", capacity=4, depth=9),)
    )
    assert queue_bar(full, "a") == "██████████ 9/4"
    assert queue_bar(full, "b") == ""
    assert shorten("two\nlines", 20) == "two lines"
    assert shorten("abcdefgh", 5) == "abcd…"


def test_what_a_narrower_terminal_has_wrapped_is_erased(monkeypatch):
    monkeypatch.setattr("pipegraph.profile.live.REDRAW_S", 1e6)
    screen = console()

    def drawn():
        shown, screen.file = screen.file.getvalue(), io.StringIO()
        return shown

    with graph().loader() as loader, Live(loader, screen) as live:
        drawn()
        live._show()
        same = drawn()
        wrapped = sum(len(each.rstrip("\r")) > 40 for each in plain(same).replace("\r", "\n").split("\n"))
        screen.width = 40
        live._show()
        assert wrapped >= 2
        assert drawn().count("\x1b[1A") == same.count("\x1b[1A") + wrapped
        live._show()
        assert drawn().count("\x1b[1A") == same.count("\x1b[1A")


def test_the_last_line_does_not_say_that_training_waited_and_set_the_pace():
    with graph().loader() as loader:
        list(loader)
        found = dataclasses.replace(loader.profile(), bottleneck="consumer", elapsed_s=10.0, stall_s=6.0)
    assert line(found).endswith("waited 60 %")
    assert line(dataclasses.replace(found, stall_s=0.2)).endswith("waited 2 %, training sets the pace")


def test_a_pipe_is_told_that_the_block_was_left_by_an_exception():
    screen = console(terminal=False)
    with pytest.raises(KeyError), graph().loader() as loader, Live(loader, screen):
        raise KeyError("mine")
    assert screen.file.getvalue().startswith("stopped: ")
