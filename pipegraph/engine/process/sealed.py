"""An object pickled once into memory that all worker processes share.

Arrays in it (such as a dataset in memory) are mapped copy-on-write: all workers share one copy until one writes to it.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipegraph.device.slabs import aligned
from pipegraph.engine.process.pickling import Take, TreePickler, set_apart
from pipegraph.engine.process.segments import OwnMemory, anonymous_file
from pipegraph.errors import NotPicklableError, PipegraphWarning

MAX_SHARED = 32
"""Storages of tensors in shared memory, whose descriptors a process gets; their number in a message is limited."""


class Sealed:
    """A pickled object in an anonymous file, whose descriptor is passed to every process that needs the object.

    Raises:
        NotPicklableError: it cannot be pickled; names the part that cannot, the ``stage``, and what to do instead.
            Or, unless it ``copies`` these with a warning, it has arrays in memory that processes share.
    """

    def __init__(self, value: object, stage: str, copies: bool = True) -> None:
        take, buffers = set_apart()
        file = io.BytesIO()
        pickler = _SealingPickler(file, take, copies)
        try:
            pickler.dump(value)
        except Exception as error:
            raise cannot_be_sent(value, stage, error) from error
        self._storages = pickler.storages
        if pickler.shared:
            warnings.warn(
                f"stage {stage!r}: its processes get a copy of {pickler.shared}: they do not see what is written there "
                "from now on, and others do not see what they write. Threads share it; for arrays that nobody writes "
                "to, no shared memory is needed here: all workers share one copy (of a file: memmap(mode='r'))",
                PipegraphWarning,
                stacklevel=2,
            )
        parts = [memoryview(file.getvalue()), *buffers]
        self.spans: list[tuple[int, int]] = []
        end = 0
        for part in parts:
            self.spans.append((end, part.nbytes))
            end += aligned(part.nbytes)
        self.fd = anonymous_file(max(end, 1))
        try:
            with mmap.mmap(self.fd, max(end, 1)) as memory:
                for (start, nbytes), part in zip(self.spans, parts, strict=True):
                    memory[start : start + nbytes] = part
        except BaseException:
            self.close()
            raise

    @property
    def descriptors(self) -> list[int]:
        """That of the object, and those of the shared storages in it, which these own."""
        return [self.fd, *(storage._share_fd_cpu_()[0] for storage in self._storages)]

    def close(self) -> None:
        """Close our descriptor; other processes keep theirs."""
        self._storages.clear()
        # Before it is closed: a Ctrl-C meanwhile must not have the number closed again.
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class _SealingPickler(TreePickler):
    """Refuses what could be pickled and not be read again, and notices memory that processes share.

    Attributes:
        shared: what lies in such memory; empty if nothing does.
    """

    def __init__(self, file: object, take: Take, copies: bool) -> None:
        super().__init__(file, take)
        self._copies = copies
        self.shared = ""
        self.storages: list[Any] = []
        self._numbers: dict[int, int] = {}  # of storages, by address

    def reducer_override(self, value: object) -> object:
        kind = type(value)
        # A parameter has a tensor, which comes next.
        if isinstance(value, torch.Tensor | np.ndarray) and kind is not torch.nn.Parameter:
            if kind is torch.Tensor and (attached := self._attached(value)) is not None:
                return attached
            if not self.shared and _is_shared(value):
                self.shared = f"a {kind.__name__} in memory that processes share"
                if not self._copies:
                    raise pickle.PicklingError(self.shared)
        elif isinstance(value, torch.UntypedStorage):
            raise pickle.PicklingError("a storage has no dtype; keep its tensor")
        return super().reducer_override(value)

    def _attached(self, tensor: Any) -> object:
        """How a process attaches to the shared memory of a tensor; None if it is not of the kind that has a name."""
        # The bits of a lazy view, and quantizers, are in no storage.
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or not tensor.numel():
            return None
        if not _is_shared(tensor) or _multiprocessing.get_sharing_strategy() != "file_descriptor":
            return None
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage.data_ptr(), len(self.storages))
        if number == len(self.storages):
            if number >= MAX_SHARED or storage._share_fd_cpu_()[0] < 0:
                return None
            self._numbers[storage.data_ptr()] = number
            self.storages.append(storage)
        place = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return _attach, (number, storage.nbytes(), place, tensor.requires_grad and tensor.is_leaf)


def _attach(number: int, nbytes: int, place: tuple[Any, ...], grad: bool) -> torch.Tensor:
    dtype, *rest = place
    storage = _attaching[number]
    if type(storage) is int:
        storage = _attaching[number] = _storage._new_shared_fd_cpu(storage, nbytes)
    made = torch.empty(0, dtype=dtype).set_(storage, *rest)
    return made.requires_grad_() if grad else made


def _is_shared(value: object) -> bool:
    """Whether what is written to a tensor or an array is seen by other processes."""
    while isinstance(value, np.ndarray):
        if not value.size:
            return False
        copied = getattr(value, "mode", None) == "c"  # of a memmap: when it is written to
        if copied or not value.flags.writeable:
            return False
        value = value.base
    tensor: Any = value
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided or value.is_nested:
            return False
        return bool(value.numel() and tensor.is_shared())
    while isinstance(value, memoryview):
        value = value.obj
    if isinstance(value, mmap.mmap):
        return not isinstance(value, OwnMemory)
    return hasattr(value, "_wrapper")  # one of multiprocessing's arrays


def cannot_be_sent(value: object, stage: str, error: Exception) -> NotPicklableError:
    """The error that names the part of an object that cannot be pickled."""
    return NotPicklableError(
        f"stage {stage!r}: the operator cannot be sent to another process: {_culprit(value, error)}. "
        f"Make it in open(context) or at first use, or use backend='thread'"
    )


_multiprocessing: Any = torch.multiprocessing
_storage: Any = torch.UntypedStorage
_attaching: list[Any] = []
"""While an object is unsealed: the descriptors of shared storages, and the storages once they are attached."""


def unseal(fd: int, spans: list[tuple[int, int]], shared: Sequence[int] = ()) -> object:
    """Unpickle the object, in another process, by its main thread; closes ``fd`` and those of ``shared`` storages."""
    memory: Any = np.frombuffer(
        OwnMemory(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE), np.uint8
    )
    os.close(fd)
    parts = [memoryview(memory)[start : start + nbytes] for start, nbytes in spans]
    _attaching[:] = shared
    try:
        return pickle.loads(parts[0], buffers=parts[1:])
    finally:
        _attaching.clear()
        for each in shared:
            os.close(each)


def _culprit(value: object, error: Exception) -> str:
    """The path from ``value`` to the attribute that cannot be pickled."""
    path, passed = type(value).__name__, [value]
    while len(passed) <= 8:
        for name, inner in _inside(value):
            if any(inner is each for each in passed):
                continue  # it refers to itself
            try:
                TreePickler(io.BytesIO(), lambda buffer: False).dump(inner)
            except Exception as why:
                path, value, error = f"{path}{name}", inner, why
                passed.append(inner)
                break
        else:
            break
    return f"{path} (a {type(value).__name__}): {error}"


def _inside(value: Any) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", inner) for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", inner) for index, inner in enumerate(value)]
    found = [(f".{name}", inner) for name, inner in getattr(value, "__dict__", {}).items()]
    closure = getattr(value, "__closure__", None) or ()
    names = value.__code__.co_freevars if closure else ()
    return found + [(f" -> {name}", cell.cell_contents) for name, cell in zip(names, closure, strict=True)]
