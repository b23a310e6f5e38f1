"""Adds to an item's error the stage, the sample and its position, and logs the first that a policy handles."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from pipegraph.bundle import DROPPED
from pipegraph.chunk import Chunk
from pipegraph.contracts import Operator
from pipegraph.errors import as_raised, note, shown
from pipegraph.stage_spec import StageSpec

if TYPE_CHECKING:
    from pipegraph.engine.stage.ledger import Quarantined

log = logging.getLogger("pipegraph")


def explain(error: BaseException, stage: str, chunk: Chunk) -> BaseException:
    """Add a note that names stage, sample and position; returns the error to raise."""
    error = as_raised(error, f"stage {stage!r}: the function")
    note(error, f"pipegraph: stage {stage!r}, {where(chunk)}{_fields(error, chunk)}")
    return error


def _fields(error: BaseException, chunk: Chunk) -> str:
    """The fields of the sample, for an error about a missing one; else an empty string."""
    if type(error) is not KeyError or not isinstance(chunk.data, dict):
        return ""
    asked = error.args[0] if len(error.args) == 1 else None
    if not isinstance(asked, str) or asked in chunk.data:
        return ""
    return f"; its fields are {', '.join(map(str, islice(chunk.data, 20)))}"


def where(chunk: Chunk) -> str:
    """The samples and the epoch of a chunk, for messages."""
    return _where(chunk.keys, [row[1] for row in chunk.lineages], chunk.epoch)


def _where(keys: Sequence[object], positions: Sequence[int], epoch: int) -> str:
    if len(keys) == 1:
        return f"sample {shown(keys[0])} at position {positions[0]}, epoch {epoch}"
    some = ", ".join(map(shown, keys[:4])) + (", ..." if len(keys) > 4 else "")
    return (
        f"batch of {len(keys)} samples ({some}) at positions {positions[0]}..{positions[-1]}, epoch {epoch}"
    )


def log_first(spec: StageSpec, lost: Sequence[Quarantined]) -> None:
    """Log the first item that a stage has left out, by its samples.

    Args:
        spec: has the policy.
    """
    first = lost[0]
    log.warning(
        "stage %r: %s, was left out: %s. on_error=%r says so; further ones are only counted, and listed in "
        "loader.profile().quarantined",
        *(first.stage, _where([each.key for each in lost], [each.position for each in lost], first.epoch)),
        *(first.error, spec.on_error),
    )


def checked(out: object, operator: Operator, stage: str) -> object:
    """The result of a map's ``process``: a chunk, or ``DROPPED`` for None where the operator may drop some."""
    if out is None and not operator.one_to_one:
        return DROPPED
    if not isinstance(out, Chunk):
        raise not_a_chunk(out, stage, "process", type(operator).__name__)
    return out


def not_a_chunk(out: object, stage: str, method: str, kind: str = "the operator") -> TypeError:
    """The error for an operator that returned something else."""
    if out is None:
        return TypeError(
            f"stage {stage!r}: {method} must return a Chunk, got None: return the chunk, or declare one_to_one = False "
            f"on {kind} if it drops some"
        )
    return TypeError(f"stage {stage!r}: {method} must return a Chunk or None, got {type(out).__name__}")
