"""Records of the rows that actors have in work, in the cluster's key-value store, which survives an actor."""

from __future__ import annotations

import contextlib

from pipegraph.engine.remote.worker import NOTHING

_NAMESPACE = b"pipegraph"


def note(key: bytes, row: int, member: int) -> None:
    """Record the start of a row in a fused stage. Called in the actor."""
    from ray.experimental.internal_kv import _internal_kv_put

    with contextlib.suppress(Exception):  # without the cluster's head, it could not be read either
        _internal_kv_put(key, b"%d %d" % (row, member), namespace=_NAMESPACE)


def noted(key: bytes) -> tuple[int, int]:
    """The row, and the fused stage, that the actor recorded last."""
    from ray.experimental.internal_kv import _internal_kv_get

    with contextlib.suppress(Exception):
        found = _internal_kv_get(key, namespace=_NAMESPACE)
        if found is not None:
            row, member = found.split()
            return int(row), int(member)
    return NOTHING, 0


def forget(key: bytes) -> None:
    """Delete an actor's record."""
    from ray.experimental.internal_kv import _internal_kv_del

    with contextlib.suppress(Exception):
        _internal_kv_del(key, namespace=_NAMESPACE)
