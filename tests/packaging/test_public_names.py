"""The public names: exported, documented, in the reference, and their docstrings say what they raise."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
API = (ROOT / "docs" / "api.md").read_text()


def documented(table):
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def exported(package):
    """The names that an ``__init__`` imports for others, ``from x import name as name``, and those it imports later."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    return {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }


def test_the_exported_names_are_the_documented_ones():
    import pipegraph

    first, second, third, fourth, fifth = re.split(r"^`from pipegraph import .*$", API, flags=re.M)
    assert exported("pipegraph") < set(pipegraph.__all__) == documented(first)
    assert exported("operators") == set(pipegraph.operators.__all__) == documented(second)
    assert exported("pipegraph/testing") == documented(third)
    assert exported("pipegraph/order") == documented(fourth)
    assert set(vars(pipegraph.types)) >= documented(fifth)


def test_every_documented_name_is_in_the_reference():
    import inspect

    import pipegraph

    pages = (ROOT / "docs" / "reference").glob("*.md")
    there = {name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)}
    entries = re.split(r"^`from pipegraph import .*$", API, flags=re.M)
    spaces = (pipegraph, pipegraph.operators, pipegraph.testing, pipegraph.order, pipegraph.types)
    wanted = {
        getattr(space, name)
        for space, table in zip(spaces, entries, strict=True)
        for name in documented(table)
    }
    # Shown as the class that they make; names of types stand with the module that has them.
    wanted -= {pipegraph.live, pipegraph.record, pipegraph.order.History, pipegraph.order.LayoutLike}
    missing = [
        f"{each.__module__}.{each.__name__}"
        for each in wanted
        if not inspect.ismodule(each) and not {each.__module__, f"{each.__module__}.{each.__name__}"} & there
    ]
    assert not missing


@pytest.mark.parametrize("name", sorted(documented(API.split("`from pipegraph import operators as ops`")[0])))
def test_every_exported_name_is_there(name):
    import pipegraph

    assert getattr(pipegraph, name) is not None
    assert name in dir(pipegraph)


def test_public_docstrings_say_what_is_raised():
    """Of classes, of their methods with a docstring, and of functions: those that raise by themselves."""
    import inspect

    import pipegraph

    def raising(function):
        source = inspect.getsource(inspect.unwrap(function))
        return re.search(r"^\s+raise (?!NotImplementedError)\w", source, re.M)

    silent = []
    entries = re.split(r"^`from pipegraph import .*$", API, flags=re.M)
    spaces = (pipegraph, pipegraph.operators, pipegraph.testing, pipegraph.order, pipegraph.types)
    for space, table in zip(spaces, entries, strict=True):
        for name in documented(table):
            public = getattr(space, name)
            if inspect.isfunction(public):
                found = {name: (public, public.__doc__)}
            elif not inspect.isclass(public) or not public.__module__.startswith("pipegraph."):
                continue
            else:
                made = vars(public).get("__init__"), vars(public).get("__post_init__")
                found = {f"{name}()": (each, public.__doc__) for each in made if inspect.isfunction(each)}
                for method, value in vars(public).items():
                    value = value.fget if isinstance(value, property) else value
                    if inspect.isfunction(value) and not method.startswith("_") and value.__doc__:
                        found[f"{name}.{method}"] = value, value.__doc__
            silent += [
                what
                for what, (function, text) in found.items()
                if function.__module__.startswith("pipegraph")
                and "<" not in function.__code__.co_filename
                and raising(function)
                and "Raises" not in (text or "")
            ]
    assert silent == []
