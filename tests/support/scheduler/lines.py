"""Every line of chosen modules as a switch point, by a trace function."""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any


class LineTracer:
    """Calls ``point`` before each line of functions in files whose path ends with one of ``files``.

    Where a ``with`` block is left, CPython delivers no signal between its last line and ``__exit__``: ``point`` is
    called with ``False`` there, and raises no fault.
    """

    def __init__(self, files: tuple[str, ...], point: Callable[[bool], None]) -> None:
        self._files = files
        self._point = point

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """For ``sys.settrace``."""
        return self._line if frame.f_code.co_filename.endswith(self._files) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._point(frame.f_lasti not in _exits(frame.f_code))
        return self._line


@cache
def _exits(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions with which a ``with`` block calls ``__exit__(None, None, None)``."""
    found = list(dis.get_instructions(code))
    return frozenset(
        first.offset
        for first, second, third in zip(found, found[1:], found[2:], strict=False)
        if all(each.opname == "LOAD_CONST" and each.argval is None for each in (first, second, third))
    )
