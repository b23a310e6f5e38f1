"""The kinds of operators, one file each: a kind's worker loop, its cursors, and what the planner asks of it.

A new kind is a file with a ``StageKind`` (see ``planning.kind``) and its line in ``_CLASSES``; ``kind_of`` finds it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from pipegraph.contracts import Operator, Source
from pipegraph.errors import GraphError
from pipegraph.planning.kind import StageKind

_CLASSES = {
    "source": "source.SourceKind",
    "map": "map.MapKind",
    "expand": "expand.ExpandKind",
    "regroup": "regroup.RegroupKind",
    "rows": "rows.RowKind",
    "fan_in": "fan_in.FanInKind",
    "route": "route.RouteKind",
}
"""By the ``kind`` that an operator's class names."""

_RANDOM_ACCESS = "random_access.RandomAccessKind"
_STATEFUL = ("map", "expand", "regroup")


@cache
def _kind(place: str) -> StageKind:
    """Imported at its first use: a graph waits for the kinds that it has."""
    module, name = place.split(".")
    made: StageKind = getattr(import_module(f"{__name__}.{module}"), name)()
    return made


@cache
def _stateful(name: str) -> StageKind:
    from pipegraph.engine.kinds.stateful import StatefulKind

    return StatefulKind(_kind(_CLASSES[name]))


def kind_of(operator: Operator | Source) -> StageKind:
    """The kind of an operator.

    Raises:
        GraphError: there is no such kind.
    """
    name: str = operator.kind
    if name not in _CLASSES:
        known = ", ".join([repr(each) for each in _CLASSES])  # `map` is a module here
        raise GraphError(f"{operator.name}: kind is {operator.kind!r}, and must be one of {known}")
    if isinstance(operator, Source):
        return _kind(_RANDOM_ACCESS if operator.random_access else _CLASSES[name])
    return _stateful(name) if operator.stateful and name in _STATEFUL else _kind(_CLASSES[name])
