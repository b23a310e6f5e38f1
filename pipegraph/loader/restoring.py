"""Reads a loader's state before a resume, and warns of differences that may be unintended."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from pipegraph.errors import PipegraphWarning, StateError
from pipegraph.loader.adapt import adapted_all
from pipegraph.loader.state import Restored, carrying_others, restored
from pipegraph.planning.plan import Plan


def read_state(
    state: Any, allow: str | Sequence[str], plan: Plan, rank: int, world_size: int, equal: bool
) -> Restored:
    """See :meth:`Loader.load_state_dict`; warnings point at its caller."""
    names = (allow,) if isinstance(allow, str) else tuple(allow)
    if names:
        state, said = adapted_all(state, plan, names)
        if said:
            about = f"the state is of a graph that was changed since: {'; '.join(said)}"
            warnings.warn(about, PipegraphWarning, stacklevel=3)
    found = restored(state, rank, world_size, plan, equal)
    saved = (state[0] if isinstance(state, list | tuple) else state)["world_size"]
    if len(found.streams) > 1 and saved != world_size:
        _warn_of_tails(plan, len(found.streams))
    others = [name for name in carrying_others(state, plan) if name not in names]
    if others:
        warnings.warn(
            f"stage {', '.join(map(repr, others))}: its functions have the names that they had when the state was "
            "saved, and other values in their defaults, in what they close over or in their object's attributes. "
            "Where these change the data, what follows is not what would have followed; "
            f"load_state_dict(state, allow={tuple(others)!r}) says that this is meant",
            PipegraphWarning,
            stacklevel=3,
        )
    if plan.seed is not None and found.seed != plan.seed:
        raise StateError(
            f"the state was saved with seed={found.seed}, graph {plan.graph_name!r} has seed={plan.seed}"
        )
    return found


def _warn_of_tails(plan: Plan, parts: int) -> None:
    """The parts of former ranks continue one after the other, each with an end of its own."""
    for stage in plan.running:
        operator: Any = stage.operator
        if stage.kind.gathers and (operator.drop_last or operator.length(1) == 0):
            warnings.warn(
                f"stage {stage.name!r}: this rank continues the parts of {parts} former ranks one after the other, and "
                "what is left over at the end of each is left out, not only at the end of the epoch. To keep it, "
                f"resume with the former world_size, or without drop_last (and allow={(stage.name,)!r})",
                PipegraphWarning,
                stacklevel=4,
            )
