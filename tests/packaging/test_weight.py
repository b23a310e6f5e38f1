"""The lines of code proper of each package stay within the budget in docs/architecture.md."""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_TOTAL = 30_000

_SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_proper(text: str) -> int:
    """Lines that hold a token of code: no blanks, no comments, no strings that stand alone."""
    alone: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        value = getattr(node, "value", None) if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            alone.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SILENT:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - alone)


def budgets() -> dict[str, int]:
    """Package -> lines, of the map's tree."""
    tree = re.search(r"```text\n(pipegraph/ .*?)```", (ROOT / "docs/architecture.md").read_text(), re.S)
    assert tree
    return {name: int(lines) for name, lines in re.findall(r"^ *(\w+)/ +(\d+) ", tree[1], re.M)}


def weights() -> Counter[str]:
    found: Counter[str] = Counter()
    for folder in ("pipegraph", "operators"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            if parts[:2] != ("pipegraph", "operators"):  # the link
                package = parts[1] if folder == "pipegraph" and len(parts) > 2 else parts[0]
                found[package] += code_proper(path.read_text())
    return found


def test_only_code_counts():
    assert code_proper('"""A page.\n\nMore.\n"""\n\n# why\nx = """a\nb"""\n') == 2


def test_every_package_stays_within_its_budget():
    allowed, found = budgets(), weights()
    assert set(allowed) == set(found)
    over = {name: (lines, allowed[name]) for name, lines in found.items() if lines > allowed[name]}
    assert not over, f"(lines, budget): {over}"
    assert sum(allowed.values()) <= MAX_TOTAL
