"""The map in docs/architecture.md is true: who imports whom, and what there is."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAP = (ROOT / "docs" / "architecture.md").read_text()

# The doors that docs/architecture.md names: imports at the moment of use, downwards.
DOORS = {("graph", "planner"), ("graph", "loader"), ("graph", "operators"), ("loader", "profile")}


def levels():
    found, level = {}, None
    for row in re.findall(r"^\| (\d[^|]*|)\| `(\w+)` \|", MAP, re.M):
        level = int(row[0].split()[0]) if row[0].strip() else level
        found[row[1]] = level
    return found


def modules():
    """``(unit, file, dotted name)`` of every module; a unit is what stands directly under pipegraph."""
    for folder, prefix in ((ROOT / "pipegraph", ()), (ROOT / "operators", ("operators",))):
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder)
            if prefix == () and inside.parts[0] == "operators":
                continue
            parts = (*prefix, *inside.with_suffix("").parts)
            if parts != ("__init__",):
                yield parts[0], path, parts


def imports(path, parts):
    """``(unit imported, whether at the moment of use)``; what only the type checker sees is left out."""
    package = parts[:-1]

    def walk(node, lazy):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                for alias in child.names:
                    names = alias.name.split(".")
                    if names[0] == "pipegraph" and len(names) > 1:
                        yield names[1], lazy
            elif isinstance(child, ast.ImportFrom):
                names = (child.module or "").split(".") if child.module else []
                if child.level:
                    names = ["pipegraph", *package[: len(package) - child.level + 1], *names]
                if names[:1] == ["pipegraph"]:
                    if len(names) > 1:
                        yield names[1], lazy
                    else:
                        yield from ((alias.name, lazy) for alias in child.names)
            inner = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from walk(child, inner)

    yield from walk(ast.parse(path.read_text()), False)


def test_the_map_names_exactly_the_modules_that_there_are():
    assert {unit for unit, _, _ in modules()} == set(levels())


def test_every_module_imports_only_from_its_level_or_above_and_the_doors_are_the_documented_ones():
    level, used, wrong = levels(), set(), []
    for unit, path, parts in modules():
        for other, lazy in imports(path, parts):
            if other not in level or other == unit:
                continue
            if lazy and (unit, other) in DOORS:
                used.add((unit, other))
            elif level[other] > level[unit]:
                wrong.append(
                    f"{path.relative_to(ROOT)} ({unit}, level {level[unit]}) imports {other} ({level[other]})"
                )
    assert not wrong, "\n".join(wrong)
    assert used == DOORS
    documented = set(re.findall(r"^\| `(\w+)\.\w+` \| `(\w+)` \|", MAP, re.M))
    assert {(first.lower(), second) for first, second in documented} == DOORS


def test_there_is_no_circle_of_modules():
    level, sorter = levels(), TopologicalSorter()
    for unit, path, parts in modules():
        for other, _ in imports(path, parts):
            if other in level and other != unit and (unit, other) not in DOORS:
                sorter.add(unit, other)
    sorter.prepare()


def test_only_the_cuda_backend_mentions_torch_cuda():
    told = [
        str(path.relative_to(ROOT))
        for _, path, _ in modules()
        if any(
            isinstance(node, ast.Attribute)
            and node.attr == "cuda"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
            for node in ast.walk(ast.parse(path.read_text()))
        )
    ]
    assert told == ["pipegraph/device/cuda.py"]
