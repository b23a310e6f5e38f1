"""Pad: fills ragged fields and returns their lengths or masks; and what is given for each field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any, final

import torch

from pipegraph.errors import DataError, GraphError, shown
from pipegraph.integers import integer


@final
@dataclass(frozen=True, slots=True)
class Pad:
    """For ``Batch(pad=...)``: how a field of arrays, or of lists of numbers, is padded to one size.

    Mask and lengths refer to a sample's first dimension. They become fields beside the padded one, so samples must be
    dicts.

    Args:
        value: the padding.
        mask: adds a bool tensor (N, size), true for values and false for padding, named ``"<name>_mask"`` (True) or as
            given.
        lengths: adds an int64 tensor (N,), named ``"<name>_length"`` (True) or as given.
        to: the size of the first dimension; a longer sample is an error. By default the size of the longest sample.
        multiple_of: the size is rounded up to a multiple of this.

    Raises:
        GraphError: ``value`` is not a number, a size is below 1, or both ``to`` and ``multiple_of`` are given.
        DataError: while it runs: a sample is longer than ``to``.
    """

    value: float = 0
    mask: bool | str = False
    lengths: bool | str = False
    to: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.value, bool | str) or not isinstance(self.value, bool | int | float | complex):
            raise GraphError(f"Pad: value must be a number, got {shown(self.value)}")
        for name in ("mask", "lengths"):
            if not isinstance(getattr(self, name), bool | str):
                raise GraphError(
                    f"Pad: {name} must be True, False or the name of a field, got {getattr(self, name)!r}"
                )
        if self.mask == self.lengths and isinstance(self.mask, str):
            raise GraphError(
                f"Pad: mask and lengths are two fields and need two names, got {self.mask!r} for both"
            )
        if self.to is not None:
            object.__setattr__(self, "to", integer(self.to, "Pad: to"))
        object.__setattr__(self, "multiple_of", integer(self.multiple_of, "Pad: multiple_of"))
        if self.to is not None and self.multiple_of != 1:
            raise GraphError("Pad: give to or multiple_of, not both")

    @property
    def plain(self) -> bool:
        """Whether it fills up to the longest, and no more."""
        return not self.mask and not self.lengths and self.to is None and self.multiple_of == 1

    def size(self, longest: int, field: str) -> int:
        """Of the first dimension in a batch.

        Raises:
            DataError: a sample is longer than ``to``.
        """
        if self.to is None:
            return -(-longest // self.multiple_of) * self.multiple_of
        if longest > self.to:
            raise DataError(
                f"field {field!r}: a sample of {longest} entries in a batch padded to {self.to}; cut it in a Map "
                "before Batch, or choose a larger Pad(to=...)"
            )
        return self.to

    def fields(self, name: str, lengths: list[int], size: int) -> dict[str, Any]:
        """The fields beside ``name``."""
        counts = torch.tensor(lengths, dtype=torch.int64)
        made = {}
        if self.mask:
            made[self.mask if isinstance(self.mask, str) else f"{name}_mask"] = (
                torch.arange(size) < counts[:, None]
            )
        if self.lengths:
            made[self.lengths if isinstance(self.lengths, str) else f"{name}_length"] = counts
        return made


class ByField(dict[Any, Any]):
    """What fills each field, or makes it; all others are filled with ``otherwise``."""

    def __init__(self, named: Mapping[Any, Any], otherwise: Any = None) -> None:
        super().__init__(named)
        self._otherwise = otherwise

    def get(self, name: Any, default: Any = None) -> Any:
        return super().get(name, self._otherwise)


def check_pad(pad: Any) -> bool:
    """Whether it only fills: equal sizes stay as they are, and no field is added.

    Raises:
        GraphError: it is something that ``Batch(pad=...)`` does not take.
    """
    values = list(pad.values()) if isinstance(pad, Mapping) else [] if pad is None else [pad]
    for value in values:
        if not isinstance(value, Pad | Number):
            raise GraphError(
                f"Batch: pad must be a number, an ops.Pad, or a mapping from field to one of these, got {shown(value)}"
            )
    return all(each.plain for each in values if isinstance(each, Pad))
