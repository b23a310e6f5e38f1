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
    "random access": RandomAccessKind(),
    "sidecar": RemoteStagesKind(),
    "map": MapKind(),
    "rows": RowKind(),
    "expand": ExpandKind(),
    "regroup": RegroupKind(),
    "merge": FanInKind(),
    "route": RouteKind(),
}
"""By an operator's ``kind``."""

_STATEFUL = {name: StatefulKind(KINDS[name]) for name in ("map", "expand", "regroup")}


def kind_of(operator: Operator | Source) -> StageKind:
    """The kind of an operator.

    Raises:
        GraphError: there is no such kind.
    """
    name: str = operator.kind
    if name not in KINDS:
        known = ", ".join(map(repr, KINDS))
        raise GraphError(f"{operator.name}: kind is {name!r}, and must be one of {known}")
    if isinstance(operator, Source):
        return KINDS["random access" if operator.random_access else name]
    if operator.stateful:
        return _STATEFUL.get(name, KINDS[name])
    return KINDS["rows" if isinstance(operator, RowOperator) else name]
