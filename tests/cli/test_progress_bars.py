"""The progress line, on a terminal and off it."""

import io

from rich.console import Console

from pipegraph.cli.commands import ProgressLine


def shown(terminal, quiet=False):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, highlight=False, quiet=quiet)
    with ProgressLine("a title", quiet=quiet, console=console) as progress:
        for epoch in range(2):
            progress.begin(f"epoch {epoch}", 100)
            for step in range(100):
                progress.reach(step + 1, 8, f"loss {step}")
            progress.say(f"[end] of epoch {epoch}")
    return out.getvalue()


def test_off_a_terminal_it_is_what_is_said():
    assert shown(terminal=False).splitlines() == ["a title", "[end] of epoch 0", "[end] of epoch 1"]


def test_on_a_terminal_one_bar_is_drawn_in_place_and_a_finished_one_is_gone():
    text = shown(terminal=True)
    last = text.rpartition("[end] of epoch 1")[2]
    assert "epoch 1" in text
    assert "ETA" in last
    assert "epoch 0" not in last
