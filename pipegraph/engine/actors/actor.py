"""The Ray actor of a stage: the same worker as in a worker process, called through Ray."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback

import torch

from pipegraph import concurrency
from pipegraph.bundle import Pack
from pipegraph.contracts import Context
from pipegraph.engine.actors.parcel import Parcel, Received
from pipegraph.engine.remote.child import called, opened_worker
from pipegraph.engine.remote.exceptions import Carried
from pipegraph.engine.remote.worker import NOTHING, OperatorCounts, ProcessWorker, unsent

_NAMESPACE = b"pipegraph"
"""Of the records in the cluster's key-value store, which survive an actor."""


def note(key: bytes, row: int) -> None:
    """Record the start of a row. Called in the actor."""
    from ray.experimental.internal_kv import _internal_kv_put

    with contextlib.suppress(Exception):  # without the cluster's head, it could not be read either
        _internal_kv_put(key, b"%d" % row, namespace=_NAMESPACE)


def noted(key: bytes) -> int:
    """The row that the actor recorded last."""
    from ray.experimental.internal_kv import _internal_kv_get

    with contextlib.suppress(Exception):
        found = _internal_kv_get(key, namespace=_NAMESPACE)
        if found is not None:
            return int(found)
    return NOTHING


def forget(key: bytes) -> None:
    """Delete an actor's record."""
    from ray.experimental.internal_kv import _internal_kv_del

    with contextlib.suppress(Exception):
        _internal_kv_del(key, namespace=_NAMESPACE)


class ActorProgress:
    """The row in work and its start time; while ``noting``, it is also written where it survives this process."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._call = 0
        self._now = 0, NOTHING, time.monotonic_ns()  # replaced as a whole: another thread reads it
        self.noting = False

    def begin(self, row: int) -> None:
        self._now = self._call, row, time.monotonic_ns()
        if self.noting:
            note(self._key, row)

    def enter_call(self) -> None:
        """Record the start of the next call."""
        self._call += 1
        self.begin(0)

    def look(self) -> tuple[int, int, float]:
        """``(call, row, seconds since its start)``."""
        call, row, since = self._now
        return call, row, (time.monotonic_ns() - since) / 1e9


class StageActor:
    """An actor of a stage. One thread serves ``start`` and ``call``, another one ``look``, if that is used."""

    def __init__(self, key: bytes) -> None:
        self._progress = ActorProgress(key)
        self._counts = OperatorCounts()
        self._worker: ProcessWorker | None = None
        self._thread = 0

    def start(self, sealed: Received, context: Context, pack: Pack | None) -> Parcel:
        """Open the operator; returns the exception, if one is raised."""
        torch.set_num_threads(1)
        if "cv2" in sys.modules:
            sys.modules["cv2"].setNumThreads(0)
        self._thread = concurrency.get_ident()
        try:
            self._worker = opened_worker(self._progress, sealed.shared, context, pack, self._counts)
        except BaseException as error:
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
        result = called(self._worker, name, args)
        del args
        return self._answer(result)

    def _answer(self, result: object) -> Parcel:
        counts = self._counts.take()
        try:
            answer = Parcel((result, counts), back=True)
        except Exception as error:
            error.add_note("pipegraph: what the function returned cannot be sent from its actor")
            answer = Parcel((unsent(result, error), counts), back=True)
        self._progress.begin(NOTHING)
        return answer

    def look(self) -> tuple[int, int, float, str]:
        """``(call, row in work, seconds since its start, current stack)``."""
        call, row, spent_s = self._progress.look()
        frame = sys._current_frames().get(self._thread)
        return call, row, spent_s, "" if frame is None else "".join(traceback.format_stack(frame))
