"""What Accelerate makes of a ``pg.DataLoader``: what would be lost there is said when it happens.

``prepare`` and ``skip_first_batches`` read the attributes of a loader and build another one, of the class that
``accelerate.data_loader`` names ``DataLoader``. It wraps that one, and keeps the state from before the batch that it
fetches ahead.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

from pipegraph.errors import PipegraphWarning, StateError

MODULE = "accelerate.data_loader"


def _called_from(name: str) -> FrameType | None:
    """The frame of this function of Accelerate's, if that called the caller of the caller; its frames in between are
    comprehensions and attribute lookups."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_globals.get("__name__") == MODULE:
        if frame.f_code.co_name == name:
            return frame
        frame = frame.f_back
    return None


def builds_another(kind: type) -> bool:
    """Whether it is Accelerate that reads an attribute of such a loader now; warns if it builds another kind."""
    building = _called_from("prepare_data_loader") or _called_from("skip_first_batches")
    if building is None:
        return False
    built = building.f_globals["DataLoader"]
    if building.f_locals.get("use_stateful_dataloader"):
        advice = (
            "leave out use_stateful_dataloader=True, with which it builds torchdata's: the prepared pg.DataLoader has "
            "a state of its own, which accelerator.register_for_checkpointing(loader) saves and loads"
        )
    elif not (isinstance(built, type) and issubclass(built, kind)):
        advice = "set accelerate.data_loader.DataLoader = pg.DataLoader before"
    else:
        return True
    warnings.warn(
        f"Accelerate builds another loader from this pg.DataLoader, without pipegraph's workers and state: {advice}",
        PipegraphWarning,
        stacklevel=3,
    )
    return True


def loaded_by_accelerate(state: dict[str, Any]) -> None:
    """Called where a state is loaded: Accelerate's wrapper has the same from now on, and not only from the first batch.

    Raises:
        StateError: rank 0 reads for all ranks there, and the wrapper's state counts batches that were not delivered.
    """
    loading = _called_from("load_state_dict")
    wrapper = None if loading is None else loading.f_locals.get("self")
    if wrapper is None:
        return
    ranks = getattr(getattr(wrapper, "state", None), "num_processes", 1)
    if type(wrapper).__name__ == "DataLoaderDispatcher" and ranks > 1:
        raise StateError(
            f"rank 0 reads this stream for {ranks} ranks, and Accelerate's state of it counts batches that were not "
            "delivered: give DataLoaderConfiguration(dispatch_batches=False), with which each rank reads it"
        )
    wrapper.dl_state_dict = state
