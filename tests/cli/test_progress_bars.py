"""The progress line, on a terminal and off it."""

import io

import pytest
from rich.console import Console

from pipegraph.cli import interrupts
from pipegraph.cli.progress_bars import PLAIN_STEPS, ProgressLine


def shown(terminal, quiet=False):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, highlight=False, quiet=quiet)
    with ProgressLine("a title", quiet=quiet, console=console) as progress:
        for epoch in range(2):
            progress.start(f"epoch {epoch}", 100)
            for step in range(100):
                progress.advance(step + 1, 8, f"loss {step}")
            progress.say(f"[end] of epoch {epoch}")
    return out.getvalue()


def test_off_a_terminal_it_is_a_few_plain_lines():
    lines = shown(terminal=False).splitlines()
    assert lines[0] == "a title"
    assert sum("ETA" in line for line in lines) == 2 * PLAIN_STEPS
    assert all("\x1b" not in line for line in lines)
    assert any(
        line.startswith("epoch 1:  50 %") and "images/s" in line and "loss 49" in line for line in lines
    )


def test_text_of_users_is_never_taken_for_markup():
    assert "[end] of epoch 1" in shown(terminal=False)


def test_on_a_terminal_one_bar_is_drawn_in_place_and_a_finished_one_is_gone():
    text = shown(terminal=True)
    last = text.rpartition("[end] of epoch 1")[2]
    assert "epoch 1" in text
    assert "ETA" in last
    assert "epoch 0" not in last


def test_a_ctrl_c_that_the_interpreter_drops_is_raised_at_the_next_step():
    class Interrupted:
        def __del__(self):
            raise KeyboardInterrupt  # as when the signal comes while this runs

    with interrupts.kept(), ProgressLine("", quiet=True) as progress:
        progress.start("epoch", 3)
        progress.advance(1, 1)
        Interrupted()
        with pytest.raises(KeyboardInterrupt):
            progress.advance(2, 1)
        progress.advance(3, 1)


def test_quiet_shows_nothing():
    assert shown(terminal=True, quiet=True) == ""


def test_after_a_resume_the_eta_is_judged_by_what_was_done_since():
    out = io.StringIO()
    with ProgressLine("", console=Console(file=out, force_terminal=False, width=100)) as progress:
        progress.start("epoch", 100, done=50)
        progress._started -= 10  # ten seconds have passed
        progress.advance(75, 1)
    assert "75 %" in out.getvalue()
    assert "ETA 10 s" in out.getvalue()
