"""An object pickled once into memory that all worker processes share.

Arrays in it (such as a dataset in memory) are mapped copy-on-write: all workers share one copy until one writes to it.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import warnings
from typing import Any

import numpy as np
import torch

from pipegraph.device.slabs import aligned
from pipegraph.engine.process.segments import OwnMemory, anonymous_file
from pipegraph.engine.process.wire import TreePickler, set_apart
from pipegraph.errors import NotPicklableError, PipegraphWarning


class Sealed:
    """A pickled object in an anonymous file, whose descriptor is passed to every process that needs the object.

    Raises:
        NotPicklableError: it cannot be pickled; names the part that cannot, the ``stage``, and what to do ``instead``.
            Or, unless it ``copies`` these with a warning, it has arrays in memory that processes share.
    """

    def __init__(
        self, value: Any, stage: str, instead: str = "use backend='thread'", copies: bool = True
    ) -> None:
        take, buffers = set_apart()
        file = io.BytesIO()
        pickler = _SealingPickler(file, take, copies)
        try:
            pickler.dump(value)
        except Exception as error:
            raise cannot_be_sent(value, stage, error, instead) from error
        if pickler.shared:
            warnings.warn(
                f"stage {stage!r}: its processes get a copy of {pickler.shared}: they do not see what is written there "
                "from now on, and others do not see what they write. Threads share it; for arrays that nobody writes "
                "to, share_memory_() and the like are not needed here: all workers share one copy",
                PipegraphWarning,
                stacklevel=2,
            )
        parts = [file.getbuffer(), *buffers]
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

    def close(self) -> None:
        """Close our descriptor; other processes keep theirs."""
        fd, self.fd = (
            self.fd,
            -1,
        )  # before it is closed: a Ctrl-C meanwhile must not have the number closed again
        if fd >= 0:
            os.close(fd)


class _SealingPickler(TreePickler):
    """Refuses what could be pickled and not be read again, and notices memory that processes share.

    Attributes:
        shared: what lies in such memory; empty if nothing does.
    """

    def __init__(self, file: Any, take: Any, copies: bool) -> None:
        super().__init__(file, take)
        self._copies = copies
        self._checked: set[type] = set()
        self.shared = ""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor | np.ndarray):
            if not self.shared and _is_shared(value):
                self.shared = f"a {kind.__name__} in memory that processes share"
                if not self._copies:
                    raise pickle.PicklingError(self.shared)
        elif isinstance(value, torch.UntypedStorage):
            raise pickle.PicklingError("a storage has no dtype; keep its tensor")
        elif kind not in self._checked:
            self._checked.add(kind)
            _check_rebuilt(kind)
        return super().reducer_override(value)


def _is_shared(value: Any) -> bool:
    """Whether what is written to a tensor or an array is seen by other processes."""
    while isinstance(value, np.ndarray):
        if (
            not value.flags.writeable or getattr(value, "mode", None) == "c"
        ):  # of a memmap: copied when written to
            return False
        value = value.base
    tensor: Any = value
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu" and value.layout == torch.strided and bool(tensor.is_shared())
    while isinstance(value, memoryview):
        value = value.obj
    if isinstance(value, mmap.mmap):
        return not isinstance(value, OwnMemory)
    return hasattr(value, "_wrapper")  # one of multiprocessing's arrays


def _check_rebuilt(kind: Any) -> None:
    """Raises PicklingError for a class whose ``__getattr__`` fails while an instance has no attributes yet."""
    if not hasattr(kind, "__getattr__") or kind.__new__ is not object.__new__:
        return
    try:
        getattr(object.__new__(kind), "__setstate__", None)
    except RecursionError as error:
        raise pickle.PicklingError(
            f"the __getattr__ of {kind.__qualname__} calls itself while an instance is made again; let it raise "
            "AttributeError for names that begin with '__'"
        ) from error
    except Exception:
        return  # it may be made in another way


def cannot_be_sent(
    value: Any, stage: str, error: Exception, instead: str = "use backend='thread'"
) -> NotPicklableError:
    """The error that names the part of an object that cannot be pickled."""
    return NotPicklableError(
        f"stage {stage!r}: the operator cannot be sent to another process: {_culprit(value, error)}. "
        f"Make it in open(context) or at first use, or {instead}"
    )


def unseal(fd: int, spans: list[tuple[int, int]]) -> Any:
    """Unpickle the object, in another process; closes ``fd``."""
    memory: Any = np.frombuffer(
        OwnMemory(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE), np.uint8
    )
    os.close(fd)
    parts = [memoryview(memory)[start : start + nbytes] for start, nbytes in spans]
    return pickle.loads(parts[0], buffers=parts[1:])


def _culprit(value: Any, error: Exception) -> str:
    """The path from ``value`` to the attribute that cannot be pickled."""
    if type(value) is list and len(value) == 1:  # the list of fused operators
        value = value[0]
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


def _inside(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", inner) for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", inner) for index, inner in enumerate(value)]
    found = [(f".{name}", inner) for name, inner in getattr(value, "__dict__", {}).items()]
    closure = getattr(value, "__closure__", None) or ()
    names = value.__code__.co_freevars if closure else ()
    return found + [(f" -> {name}", cell.cell_contents) for name, cell in zip(names, closure, strict=True)]
