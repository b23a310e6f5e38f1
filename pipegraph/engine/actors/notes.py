"""Which row an actor has in work, where that can be read when the actor is gone: the cluster's key-value store."""

from __future__ import annotations

import contextlib

from pipegraph.engine.process.worker import NOTHING

_NAMESPACE = b"pipegraph"


def note(key: bytes, row: int, member: int) -> None:
    """A row is begun, by this stage of a run. Called in the actor."""
    from ray.experimental.internal_kv import _internal_kv_put

    with contextlib.suppress(Exception):  # without the cluster's head nobody reads it either
        _internal_kv_put(key, b"%d %d" % (row, member), namespace=_NAMESPACE)


def noted(key: bytes) -> tuple[int, int]:
    """The row and the stage of the run that the actor has noted last."""
    from ray.experimental.internal_kv import _internal_kv_get

    with contextlib.suppress(Exception):
        found = _internal_kv_get(key, namespace=_NAMESPACE)
        if found is not None:
            row, member = found.split()
            return int(row), int(member)
    return NOTHING, 0


def forget(key: bytes) -> None:
    """Nobody asks any more."""
    from ray.experimental.internal_kv import _internal_kv_del

    with contextlib.suppress(Exception):
        _internal_kv_del(key, namespace=_NAMESPACE)
