"""How many chunks a pass delivers, and graphs in which ranks may deliver different numbers."""

from __future__ import annotations

import logging

from pipegraph.engine.stage.ledger import Ledger
from pipegraph.errors import GraphError
from pipegraph.loader.options import LoaderOptions
from pipegraph.loader.place import Place
from pipegraph.planning.plan import Plan


def check_counts_known(plan: Plan, world_size: int) -> None:
    """Raises GraphError if ranks may make different numbers of steps and ``equal_steps`` is not given."""
    unknown = plan.unknown_counts() if world_size > 1 else []
    if unknown:
        raise GraphError(
            f"stages {', '.join(map(repr, unknown))} make the number of steps depend on the data: with "
            f"{world_size} ranks say loader(equal_steps=True) to let the ranks agree, or equal_steps=False if they may "
            "differ"
        )


def _steps(plan: Plan, place: Place, rank: int, world_size: int, seed: int | None) -> int | None:
    """Chunks of the whole epoch on a rank, those before this place among them; None where the data decides."""
    steps = plan.steps(place.epoch, rank, world_size, seed, place.start.history)
    return None if steps is None else steps + (place.dealt or 0)


def warn_of_unequal(plan: Plan, place: Place, world_size: int, seed: int | None) -> None:
    """Warn if the first and the last rank make different numbers of steps."""
    first, last = (_steps(plan, place, rank, world_size, seed) for rank in (0, world_size - 1))
    if first != last:
        logging.getLogger("pipegraph").warning(
            "graph %r: epoch %d has %s steps on rank 0 and %s on rank %d, and ranks that wait for each other in "
            "every step hang at the end; loader(equal_steps=True) ends all at the same step, equal_steps=False "
            "says that they may differ",
            plan.graph_name,
            place.epoch,
            first,
            last,
            world_size - 1,
        )


def length_of(plan: Plan, place: Place, options: LoaderOptions, ledger: Ledger, seed: int | None) -> int:
    """Chunks of the epoch that a pass from this place delivers; see :meth:`Loader.__len__`."""
    if place.nothing:
        return 0
    if place.start.stream is not None or place.later:
        raise TypeError("this loader has no length in this epoch: it continues with other ranks' parts")
    rank, world_size = options.own()
    ranks = range(world_size) if options.equal_steps else (rank,)
    lengths = [_steps(plan, place, each, world_size, seed) for each in ranks]
    if None in lengths:
        names = ", ".join(map(repr, plan.unknown_counts()))
        raise TypeError(f"this loader has no length: stages {names} make it depend on the data")
    if place.restored and ledger.resumed_without == place.epoch:
        raise TypeError("this loader has no length in this epoch: samples of it were left out before")
    if place.dealt is None:
        raise TypeError(
            "this loader has no length in this epoch: it continues in a graph that was changed, or a part that waited "
            "behind another rank's"
        )
    return min(length for length in lengths if length is not None) - place.first
