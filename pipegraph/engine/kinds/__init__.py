"""The kinds of operators, one file each: a kind's worker loop, its cursors, and what the planner asks of it.

A new kind is a file with a ``StageKind`` (see ``planning.kind``) and its line in ``KINDS``.
"""

from __future__ import annotations

from pipegraph.capabilities import RowOperator
from pipegraph.contracts import Operator, Source
from pipegraph.engine.kinds.expand import ExpandKind
from pipegraph.engine.kinds.fan_in import FanInKind
from pipegraph.engine.kinds.map import MapKind
from pipegraph.engine.kinds.random_access import RandomAccessKind
from pipegraph.engine.kinds.regroup import RegroupKind
from pipegraph.engine.kinds.remote_stages import RemoteStagesKind
from pipegraph.engine.kinds.route import RouteKind
from pipegraph.engine.kinds.rows import RowKind
from pipegraph.engine.kinds.source import SourceKind
from pipegraph.engine.kinds.stateful import StatefulKind
from pipegraph.errors import GraphError
from pipegraph.planning.kind import StageKind

KINDS: dict[str, StageKind] = {
    "source": SourceKind(),
    "map": MapKind(),
    "expand": ExpandKind(),
    "regroup": RegroupKind(),
    "merge": FanInKind(),
    "route": RouteKind(),
}
"""By the ``kind`` that an operator's class names."""

_VARIANTS: dict[str, StageKind] = {
    "random access": RandomAccessKind(),
    "rows": RowKind(),
    "sidecar": RemoteStagesKind(),
    **{f"stateful {name}": StatefulKind(KINDS[name]) for name in ("map", "expand", "regroup")},
}


def kind_of(operator: Operator | Source) -> StageKind:
    """The kind of an operator.

    Raises:
        GraphError: there is no such kind.
    """
    name: str = operator.kind
    if isinstance(operator, Source):
        name = "random access" if operator.random_access else name
    elif operator.stateful:
        name = f"stateful {name}" if f"stateful {name}" in _VARIANTS else name
    elif isinstance(operator, RowOperator):
        name = "rows"
    found = KINDS.get(name) or _VARIANTS.get(name)
    if found is None:
        known = ", ".join(repr(each) for each in KINDS)
        raise GraphError(f"{operator.name}: kind is {operator.kind!r}, and must be one of {known}")
    return found
