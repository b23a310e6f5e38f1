"""The kinds of operators, one file each: a kind's worker loop, its cursors, and what the planner asks of it.

A new kind is a file with a ``StageKind`` (see ``planning.kind``) and its line in ``_CLASSES``; ``kind_of`` finds it.
"""

from __future__ import annotations

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

_RANDOM_ACCESS = {"random access": "random_access.RandomAccessKind"}
_STATEFUL = ("map", "expand", "regroup")


class _Kinds(dict[str, StageKind]):
    """A kind is imported at its first use: a graph waits for those that it has."""

    def __missing__(self, name: str) -> StageKind:
        if name.startswith("stateful "):
            from pipegraph.engine.kinds.stateful import StatefulKind

            made: StageKind = StatefulKind(self[name.removeprefix("stateful ")])
        else:
            module, kind = (_CLASSES | _RANDOM_ACCESS)[name].split(".")
            made = getattr(import_module(f"{__name__}.{module}"), kind)()
        return self.setdefault(name, made)


KINDS = _Kinds()
"""By the ``kind`` that an operator's class names, and those that :func:`kind_of` finds besides."""


def kind_of(operator: Operator | Source) -> StageKind:
    """The kind of an operator.

    Raises:
        GraphError: there is no such kind.
    """
    name: str = operator.kind
    if isinstance(operator, Source):
        name = "random access" if operator.random_access else name
    elif operator.stateful:
        name = f"stateful {name}" if name in _STATEFUL else name
    if name not in KINDS and name.removeprefix("stateful ") not in _CLASSES | _RANDOM_ACCESS:
        known = ", ".join([repr(each) for each in _CLASSES])  # `map` is a module here
        raise GraphError(f"{operator.name}: kind is {operator.kind!r}, and must be one of {known}")
    return KINDS[name]
