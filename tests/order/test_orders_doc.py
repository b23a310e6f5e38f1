"""The examples of docs/orders.md run and print what they say."""

from __future__ import annotations

import re
from pathlib import Path

DOC = Path(__file__).parents[2] / "docs" / "orders.md"


def test_the_examples_run_and_print_what_is_shown(capsys):
    names: dict[str, object] = {}
    shown = []
    for language, block in re.findall(r"```(python|text)\n(.*?)```", DOC.read_text(), re.DOTALL):
        if language == "python":
            exec(compile(block, str(DOC), "exec"), names)
        else:
            shown.append((block, capsys.readouterr().out))
    assert len(shown) == 1
    for block, printed in shown:
        assert block.split() == printed.split()  # the page wraps long lines
