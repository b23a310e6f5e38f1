"""The contract of operators and sources stays a page: its members are counted, and are those that the page lists."""

import inspect
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from pipegraph import operators
from pipegraph.components import Component, Source
from pipegraph.contracts import Operator, Traits

PAGE = (Path(__file__).parents[2] / "docs" / "writing-an-operator.md").read_text()

MAX_OPERATOR, MAX_SOURCE = 16, 18
BESIDE = {"uncancel"}
"""Not in the tables of members, but below them."""


def members(kind):
    """The public members that an author of an operator may override."""
    found = set()
    for each in (Component, kind):
        for name in {**vars(each), **each.__annotations__}:
            value = inspect.getattr_static(each, name, None)
            value = value.fget if isinstance(value, property) else value
            if not name.startswith("_") and not getattr(value, "__final__", False):
                found.add(name)
    return found


def listed(title, column=0):
    """The names in the first column of a section's tables."""
    section = re.search(rf"^## {title}\n(.*?)(?=^## )", PAGE + "\n## ", re.M | re.S).group(1)
    rows = [row.split("|")[1 + column] for row in re.findall(r"^\| `.*$", section, re.M)]
    return {name for row in rows for name in re.findall(r"`(\w+)", row)}


def classes():
    """Every operator and source of pipegraph's own."""
    for module in iter_modules(operators.__path__):
        if not module.ispkg:
            import_module(f"pipegraph.operators.{module.name}")
    import_module("pipegraph.loader.torch_dataloader.batch_sources")
    pending, found = [Operator, Source], set()
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        if kind.__module__.startswith("pipegraph."):
            found.add(kind)
    return found


def test_the_members_of_an_operator_are_those_that_its_page_lists():
    assert members(Operator) == listed("The members") | BESIDE
    assert len(members(Operator)) <= MAX_OPERATOR


def test_the_members_of_a_source_are_those_that_its_page_lists():
    assert members(Source) - {"kind"} == listed("A source") | BESIDE
    assert len(members(Source)) <= MAX_SOURCE + 1  # kind, which no source overrides


def test_every_trait_is_described():
    assert {each.name for each in fields(Traits)} == set(re.findall(r"^ {4,8}(\w+): ", Traits.__doc__, re.M))


def test_some_operator_has_each_trait():
    sources = "\n".join(inspect.getsource(inspect.getmodule(each)) for each in classes())
    assert all(re.search(rf"\b{each.name}=", sources) for each in fields(Traits))
