"""The contract of operators and sources stays a page: its members are counted, and are those that the page lists."""

import inspect
import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from pipegraph import capabilities, operators
from pipegraph.components import Component, Fact, Source
from pipegraph.contracts import Operator

PAGE = (Path(__file__).parents[2] / "docs" / "writing-an-operator.md").read_text()

MAX_OPERATOR, MAX_SOURCE = 16, 18
BESIDE = {"facts", "lacks", "uncancel"}
"""Not in the tables of members, but in the section about facts and capabilities."""


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


def capability_classes():
    own = [each for each in vars(capabilities).values() if inspect.isclass(each)]
    return {each.__name__: each for each in own if each.__module__ == capabilities.__name__}


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


def test_every_fact_and_capability_is_on_the_page():
    assert {*Fact.__members__, *capability_classes()} == listed("Facts and capabilities")


@pytest.mark.parametrize("name", capability_classes())
def test_some_operator_has_each_capability(name):
    assert any(
        issubclass(each, capability_classes()[name]) for each in classes() - {capability_classes()[name]}
    )


@pytest.mark.parametrize("name", capability_classes())
def test_an_operator_with_a_capabilitys_method_derives_from_it(name):
    capability = capability_classes()[name]
    if issubclass(capability, Component):
        return
    methods = {
        each for each, value in vars(capability).items() if inspect.isfunction(value) and each[0] != "_"
    }
    others = {
        each for other in capability_classes().values() if other is not capability for each in vars(other)
    }
    silent = [
        f"{kind.__name__}.{method}"
        for kind in classes()
        if not issubclass(kind, capability) and not inspect.isabstract(kind)
        for method in (methods - others) & vars(kind).keys()
    ]
    assert not silent
