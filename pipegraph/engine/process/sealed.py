"""An object pickled once into memory that all worker processes share.

Arrays in it (such as a dataset in memory) are mapped copy-on-write: all workers share one copy until one writes to it.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from typing import Any

import numpy as np

from pipegraph.device.slabs import aligned
from pipegraph.engine.process.segments import anonymous_file
from pipegraph.engine.process.wire import TreePickler, set_apart
from pipegraph.errors import NotPicklableError


class Sealed:
    """A pickled object in an anonymous file, whose descriptor is passed to every process that needs the object.

    Raises:
        NotPicklableError: it cannot be pickled; names the part that cannot, the ``stage``, and what to do ``instead``.
    """

    def __init__(self, value: Any, stage: str, instead: str = "use backend='thread'") -> None:
        take, buffers = set_apart()
        file = io.BytesIO()
        try:
            TreePickler(file, take).dump(value)
        except Exception as error:
            raise cannot_be_sent(value, stage, error, instead) from error
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
        mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE), np.uint8
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
