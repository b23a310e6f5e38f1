"""Objects that a ``with`` block closes."""

from __future__ import annotations

from typing import Self


class Closing:
    """Closed at the end of a ``with`` block, however that ends."""

    __slots__ = ()

    def close(self) -> None:
        """End what it holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
