"""Parcels: messages between the trainer and an actor, a pickle and its buffers in one Ray object.

Trees of arrays are pickled as for worker processes. Ray writes an object's buffers to its store, where the receiver
maps them: they are copied once, by the sender. A large buffer is read in place, and the object stays in the store until
the last array on it is freed. Object references and actor handles (in a user's function) are sent beside the pickle:
only Ray can send and count them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from pipegraph import concurrency
from pipegraph.engine.process.pickling import APART, Take, TreePickler, light_below, set_apart, tensor_of


class Parcel:
    """A pickled object on its way; raises what pickling it does."""

    __slots__ = ("_buffers", "_refs", "_stream", "nbytes")

    def __init__(self, value: object, back: bool = False) -> None:
        take, self._buffers = set_apart()
        file = io.BytesIO()
        pickler = _Pickler(file, take, back)
        pickler.dump(value)
        self._refs = pickler.refs
        self._stream = memoryview(file.getvalue())
        self.nbytes = self._stream.nbytes + sum([buffer.nbytes for buffer in self._buffers])

    def __reduce__(self) -> tuple[object, ...]:
        stream = self._stream if self._stream.nbytes >= APART else bytes(self._stream)
        given = stream if isinstance(stream, bytes) else pickle.PickleBuffer(stream)
        return _received, (given, self._refs, *map(pickle.PickleBuffer, self._buffers))


class _Pickler(TreePickler):
    """A pickler that leaves out what only Ray can send."""

    def __init__(self, file: object, take: Take, back: bool) -> None:
        super().__init__(file, take, back)
        self.refs: list[object] = []

    def reducer_override(self, value: object) -> object:
        if isinstance(value, ray.ObjectRef | ActorHandle):
            self.refs.append(value)
            return _of_parcel, (len(self.refs) - 1,)
        return super().reducer_override(value)


class _Opening(concurrency.local):
    """The references beside the pickle that the current thread reads."""

    refs: Sequence[object] = ()


_opening = _Opening()


def _of_parcel(number: int) -> object:
    return _opening.refs[number]


class Received:
    """A received parcel.

    It has a single reader, so its arrays may be written to, as with every backend, although Ray maps them read-only.
    """

    __slots__ = ("_buffers", "_refs", "_stream")

    def __init__(self, stream: Any, refs: Sequence[object], buffers: tuple[Any, ...]) -> None:
        self._stream = stream
        self._refs = refs
        self._buffers = buffers

    def open(self) -> Any:
        """The object, with arrays over the received memory. Can be called once.

        Raises:
            Exception: it cannot be unpickled here.
        """
        spans = [memoryview(buffer).cast("B") for buffer in self._buffers]
        light = light_below([span.nbytes for span in spans])
        views = [bytearray(span) if span.nbytes < light else memoryview(_writable(span)) for span in spans]
        self._buffers = ()
        del spans
        _opening.refs, self._refs = self._refs, ()
        try:
            return pickle.loads(self._stream, buffers=views)
        finally:
            _opening.refs = ()

    def shared(self) -> object:
        """The object, if it has several readers: tensors and small arrays are copied, large arrays are read-only."""
        views = [memoryview(buffer).cast("B") for buffer in self._buffers]
        small = [bytearray(view) if view.nbytes < READ_IN_PLACE else view for view in views]
        _opening.refs = self._refs
        try:
            return _Unsealing(io.BytesIO(self._stream), buffers=small).load()
        finally:
            _opening.refs = ()


READ_IN_PLACE = 1 << 20
"""Bytes from which on all actors of a machine read an operator's array in place."""


class _Unsealing(pickle.Unpickler):
    """An unpickler that copies the memory of tensors, which cannot be read-only."""

    def find_class(self, module: str, name: str) -> object:
        found = super().find_class(module, name)
        return _own_tensor if (module, name) == (TreePickler.__module__, "tensor_of") else found


def _own_tensor(buffer: Any, *rest: Any) -> Any:
    return tensor_of(bytearray(buffer), *rest)


def _received(stream: object, refs: Sequence[object], *buffers: object) -> Received:
    return Received(stream, refs, buffers)


class _Span:
    """Memory of an object in Ray's store through NumPy's array interface: writable, and kept alive."""

    def __init__(self, span: memoryview) -> None:
        held = np.frombuffer(span, np.uint8)
        self._held = held
        self.__array_interface__ = {
            "data": (held.ctypes.data, False),
            "shape": held.shape,
            "typestr": "|u1",
            "version": 3,
        }


def _writable(span: memoryview) -> Any:
    return np.asarray(_Span(span)) if span.readonly else span
