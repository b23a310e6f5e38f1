"""The tree in docs/architecture.md is true: what there is, and who imports whom."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAP = (ROOT / "docs" / "architecture.md").read_text()

# The exceptions in docs/architecture.md: imports, at the moment of use, of modules on lower lines.
DOORS = {
    tuple(re.findall(r"`([\w.]+)`", row)[:2])
    for row in re.findall(r"^\| `[\w.]+` \| `[\w.]+` \|.*$", MAP, re.M)
}

MAX_FOLDERS = 13
"""At the top of the package: a newcomer should take them in at a glance."""


def tree():
    """The dotted names in the tree, from the top to the bottom; a line ``...`` stands for what its folder has besides."""
    block = re.search(r"```text\n(pipegraph/\n.*?)```", MAP, re.S).group(1)
    found, above = [], []
    for line in block.splitlines()[1:]:
        indent, name = re.match(r"( *)(\S+)", line).groups()
        depth = len(indent) // 4 - 1
        above = [*above[:depth], name.rstrip("/")]
        found.append(".".join(above))
    besides = [name for name in modules() if name not in found]
    for place, name in reversed(list(enumerate(found))):
        if name.endswith("...."):  # of which none imports another
            here = [each for each in besides if each.rpartition(".")[0] == name.removesuffix("....")]
            found[place : place + 1] = sorted(here)
    return found


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


def test_the_tree_names_exactly_the_modules_that_there_are():
    assert set(tree()) == set(modules())
    assert [name for name, times in Counter(tree()).items() if times > 1] == []


def test_every_module_imports_only_from_lines_above_its_own_except_the_documented_ones():
    known, used, wrong = modules(), set(), []
    line = {name: number for number, name in enumerate(tree())}
    for name, path in known.items():
        for other, lazy in imports(name, path, known):
            if name.startswith(f"{other}.") or other.startswith(f"{name}."):
                continue  # a package's door is its own modules' list
            if line[other] > line[name]:
                door = (name, other)
                if lazy and door in DOORS:
                    used.add(door)
                else:
                    wrong.append(f"{path.relative_to(ROOT)} imports {other}, which stands below it")
    assert not wrong, "\n".join(wrong)
    assert used == DOORS


def test_profile_and_tuning_are_given_records_and_know_no_loader():
    known = modules()
    for name, path in known.items():
        if name.partition(".")[0] in ("profile", "tuning"):
            found = {other for other, _ in imports(name, path, known)}
            assert not {
                each for each in found if each.partition(".")[0] == "loader" or each == "engine.runtime"
            }, name


def test_a_newcomer_finds_few_folders_at_the_top_and_no_file_name_twice():
    top = {
        name.split(".")[0] for name, path in modules().items() if path.name == "__init__.py" or "." in name
    }
    assert len(top) <= MAX_FOLDERS
    names = Counter(path.name for path in modules().values())
    assert [name for name, times in names.items() if times > 1 and name != "__init__.py"] == []


def test_the_files_that_keep_the_promises_are_there():
    rows = re.findall(r"^\| [^|]+ \| (.*) \|$", MAP.split("## Which file keeps which promise")[1], re.M)[2:]
    for row in rows:
        folder = Path()
        for name in re.findall(r"`([\w./]+\.py|[\w/]+/)`", row):
            path = Path(name) if "/" in name else folder / name  # a name alone lies beside the one before
            folder = path.parent
            assert (ROOT / "pipegraph" / path).exists(), name
    assert len(rows) > 15


def test_no_two_classes_share_a_name():
    names = Counter(
        node.name
        for path in modules().values()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, times in names.items() if times > 1] == []


def test_every_folder_says_what_lies_in_it():
    for name, path in modules().items():
        if path.name == "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text())), name


def test_only_devices_and_dali_name_a_vendor():
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
    assert elsewhere == {"operators/dali.py", "pipegraph/cli/doctor.py"}
    assert len((ROOT / "pipegraph/device/cuda.py").read_text().splitlines()) < 120
