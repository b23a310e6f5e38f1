"""Packages import one way: only from the lines above their own in the tree of docs/architecture.md."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

DOORS = {"graph", "loader.loader"}
"""These import from below at the moment of use, so that a description needs nothing below it until it runs."""


def levels():
    """Package -> its line in the tree, from the top; the modules of pipegraph/ itself are ``pipegraph``."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    tree = re.search(r"```text\n(pipegraph/ .*?)```", text, re.S).group(1)
    return {name: line for line, name in enumerate(re.findall(r"^ *(\w+)/", tree, re.M))}


def modules():
    """``dotted name -> file``, without the leading ``pipegraph``; packages are their ``__init__``."""
    found = {}
    for folder, prefix in ((ROOT / "pipegraph", ()), (ROOT / "operators", ("operators",))):
        for path in sorted(folder.rglob("*.py")):
            parts = (*prefix, *path.relative_to(folder).with_suffix("").parts)
            if prefix or parts[0] != "operators":
                found[".".join(part for part in parts if part != "__init__")] = path
    found.pop("")
    return found


def imports(name, path, known):
    """``(module imported, whether at the moment of use or for the type checker alone)``."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]

    def walk(node, lazy):
        for child in ast.iter_child_nodes(node):
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            targets = []
            if isinstance(child, ast.Import):
                targets = [alias.name.split(".") for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = (child.module or "").split(".") if child.module else []
                if child.level:
                    base = ["pipegraph", *package[: len(package) - child.level + 1], *base]
                targets = [[*base, alias.name] for alias in child.names]
            for parts in targets:
                if parts[0] == "pipegraph":
                    dotted = ".".join(parts[1:])
                    dotted = dotted if dotted in known else dotted.rpartition(".")[0]
                    if dotted and dotted != name:
                        yield dotted, lazy
            inner = lazy or typing_only or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from walk(child, inner)

    yield from walk(ast.parse(path.read_text()), False)


def test_packages_import_only_from_those_above():
    known, line, wrong = modules(), levels(), []

    def level(name):
        top = name.partition(".")[0]
        return line[top if "." in name or known[name].name == "__init__.py" else "pipegraph"]

    for name, path in known.items():
        for other, lazy in imports(name, path, known):
            if level(other) > level(name) and not (lazy and name in DOORS):
                wrong.append(f"{path.relative_to(ROOT)} imports {other}, which is below it")
    assert not wrong, "\n".join(wrong)


def test_only_devices_and_decoders_of_a_vendor_name_one():
    """Elsewhere what a device can do is asked, so that every accelerator of torch takes the same lines."""

    def names_a_vendor(node: ast.AST) -> bool:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return "cuda" in node.value and id(node) not in docstrings
        named = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "module", None)
        names = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        return any("cuda" in str(each).lower() for each in [named, *names])

    found = set()
    for path in modules().values():
        tree = ast.parse(path.read_text())
        docstrings = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        if any(map(names_a_vendor, ast.walk(tree))):
            found.add(str(path.relative_to(ROOT)))
    elsewhere = {each for each in found if not each.startswith("pipegraph/device/")}
    assert elsewhere == {"operators/dali.py", "operators/images/on_device.py"}
