"""Every line of chosen modules as a switch point, by a trace function."""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any


class LineTracer:
    """Calls ``point`` before each line of functions in files whose path ends with one of ``files``.

    CPython delivers no signal at a bare ``try:``, which no handler covers, nor between the last line of a ``with``
    block and its ``__exit__``: ``point`` is called with ``False`` there, and raises no fault.
    """

    def __init__(self, files: tuple[str, ...], point: Callable[[bool], None]) -> None:
        self._files = files
        self._point = point

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """For ``sys.settrace``."""
        return self._line if frame.f_code.co_filename.endswith(self._files) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._point(frame.f_lasti not in _quiet(frame.f_code))
        return self._line


@cache
def _quiet(code: CodeType) -> frozenset[int]:
    """Offsets of a ``try:``, and of the instructions with which a ``with`` block calls ``__exit__(None, None, None)``;
    before them, a ``return`` out of the block puts its value aside.
    """
    found = list(dis.get_instructions(code))
    nothing = {each.offset for each in found if each.opname == "NOP"}
    exits = {
        at
        for at in range(len(found) - 2)
        if all(each.opname == "LOAD_CONST" and each.argval is None for each in found[at : at + 3])
    }
    aside = {at - 1 for at in exits if at and found[at - 1].opname == "SWAP"}
    return nothing | frozenset(found[at].offset for at in exits | aside)
