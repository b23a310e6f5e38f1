"""Nothing asks which backend a stage has: planner, engine, profile and tuner ask facts, which ``backends`` declares."""

import ast
from pathlib import Path
from typing import get_args

from pipegraph.backends import BACKENDS, BackendName

ROOT = Path(__file__).parents[2]


def _is_backend(node):
    return (isinstance(node, ast.Attribute) and node.attr == "backend") or (
        isinstance(node, ast.Name) and node.id == "backend"
    )


def _names(node):
    """The backends' names among the constants of an expression."""
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)} & set(BACKENDS)


def comparisons(source):
    """``line`` of each comparison of a backend with a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(_is_backend, sides)) and any(map(_names, sides)):
                yield node.lineno


def test_the_type_of_a_backends_name_has_those_that_there_are():
    assert get_args(BackendName) == tuple(BACKENDS)


def test_the_search_finds_comparisons():
    assert list(comparisons('a.backend == "ray"\nbackend not in ("process", "ray")\n')) == [1, 2]
    assert list(comparisons("above.backend == below.backend\nstage.backend.in_trainer\n")) == []


def test_no_backend_is_compared_with_a_name():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in ("pipegraph", "operators")
        for path in (ROOT / folder).rglob("*.py")
        for line in comparisons(path.read_text())
    ]
    assert found == []
