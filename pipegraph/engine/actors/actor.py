"""The Ray actor of a stage: the same worker as in a worker process, called through Ray."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from pipegraph import concurrency
from pipegraph.contracts import Context
from pipegraph.engine.actors.parcel import Parcel, Received
from pipegraph.engine.remote.child import opened_worker
from pipegraph.engine.remote.exceptions import Carried
from pipegraph.engine.remote.worker import NOTHING, OperatorCounts, ProcessWorker, unsent

_NAMESPACE = b"pipegraph"
"""Of the records in the cluster's key-value store, which survive an actor."""


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


class ActorProgress:
    """The row in work and its start time; while ``noting``, it is also written where it survives this process."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._call = self._member = 0
        self._now = 0, NOTHING, time.monotonic_ns(), 0  # replaced as a whole: another thread reads it
        self.noting = False

    def begin(self, row: int) -> None:
        self._now = self._call, row, time.monotonic_ns(), self._member
        if self.noting:
            note(self._key, row, self._member)

    def enter(self, member: int, row: int) -> None:
        """Record the start of a row in a fused stage."""
        self._member = member
        self.begin(row)

    def enter_call(self) -> None:
        """Record the start of the next call."""
        self._call += 1
        self.enter(0, 0)

    def look(self) -> tuple[int, int, float, int]:
        """``(call, row, seconds since its start, number of the fused stage)``."""
        call, row, since, member = self._now
        return call, row, (time.monotonic_ns() - since) / 1e9, member


class StageActor:
    """An actor of a stage. One thread serves ``start`` and ``call``, another one ``look``, if that is used."""

    def __init__(self, key: bytes) -> None:
        self._progress = ActorProgress(key)
        self._counts = OperatorCounts()
        self._worker: ProcessWorker | None = None
        self._thread = 0

    def start(self, sealed: Received, contexts: Sequence[Context], pack: Any, single: bool) -> Parcel:
        """Open the operators; returns the exception, if one is raised."""
        torch.set_num_threads(1)
        if "cv2" in sys.modules:
            sys.modules["cv2"].setNumThreads(0)
        self._thread = concurrency.get_ident()
        try:
            self._worker = opened_worker(self._progress, sealed.shared, contexts, pack, single, self._counts)
        except BaseException as error:
            if isinstance(error, ModuleNotFoundError):
                error.add_note(
                    "pipegraph: the cluster's nodes need what the operator imports: install it there, or send it with "
                    "runtime_env={'working_dir': '.'} (ray.init's, or this stage's)"
                )
            return self._answer(Carried(error))
        return self._answer(None)

    def call(self, noting: bool, request: Received) -> Parcel:
        """Call a method of the worker."""
        self._progress.noting = noting
        self._progress.enter_call()
        try:
            name, args = request.open()
        except Exception as error:
            error.add_note("pipegraph: what the stage was given cannot be read in its actor")
            return self._answer(Carried(error))
        del request
        try:
            result = getattr(self._worker, name)(*args)
        except BaseException as error:
            result = Carried(error)
        del args
        return self._answer(result)

    def _answer(self, result: Any) -> Parcel:
        counts = self._counts.take()
        try:
            answer = Parcel((result, counts), back=True)
        except Exception as error:
            error.add_note("pipegraph: what the function returned cannot be sent from its actor")
            answer = Parcel((unsent(result, error), counts), back=True)
        self._progress.enter(0, NOTHING)
        return answer

    def look(self) -> tuple[int, int, float, int, str]:
        """``(call, row in work, seconds since its start, number of the fused stage, current stack)``."""
        call, row, spent_s, member = self._progress.look()
        frame = sys._current_frames().get(self._thread)
        return call, row, spent_s, member, "" if frame is None else "".join(traceback.format_stack(frame))
