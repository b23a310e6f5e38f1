"""Threads, locks and deadlines come from one module, which a test can replace."""

import ast
from pathlib import Path

import pipegraph

ROOMS = ("engine", "loader", "reader", "replicas", "storage", "device", "operators")
HERE = Path(pipegraph.__file__).parent
FORBIDDEN = {"threading", "_thread", "queue"}


def _imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def test_no_room_takes_its_threads_and_locks_from_elsewhere():
    found = [
        f"{path.relative_to(HERE)}:{line} imports {name}"
        for room in ROOMS
        for path in sorted((HERE / room).rglob("*.py"))
        for name, line in _imported(path)
        if name in FORBIDDEN or name in ("time.monotonic", "time.monotonic_ns")
    ]
    assert found == []


def test_nobody_keeps_a_primitive_under_a_name_of_its_own():
    found = [
        f"{path.relative_to(HERE)}:{line} imports {name}"
        for path in sorted(HERE.rglob("*.py"))
        for name, line in _imported(path)
        if name.startswith("pipegraph.concurrency.")
    ]
    assert found == []
