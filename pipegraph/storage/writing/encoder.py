"""The contract of a shard encoder: samples to the bytes of one shard."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, BinaryIO, ClassVar

from pipegraph.storage.formats.shard_format import Block

from .field_kinds import Kinds

Sample = Mapping[str, Any]


class Encoder(ABC):
    """Writes one shard of about `size` bytes to a file. The same samples give the same bytes.

    Attributes:
        format: the name by which users ask for it.
        shard_name: of a shard, by its number; its suffix is that of a registered format, which reads it.
        has_columns: whether all samples have the same fields, of one of the ``kinds`` each.
        samples: written so far.
    """

    format: ClassVar[str]
    shard_name: ClassVar[str]
    has_columns: ClassVar[bool] = True
    samples: int = 0

    def __init__(self, kinds: Kinds, size: int) -> None:
        self.kinds = dict(kinds)

    @abstractmethod
    def encode(self, sample: Sample, number: int) -> Any:
        """What :meth:`add` takes, and of which :meth:`size` tells the bytes; the sample's number is its key, where it
        has none.

        Raises:
            DataError: the format has no place for a value; names the field.
        """

    @abstractmethod
    def size(self, encoded: Any) -> int:
        """The bytes that a sample adds to a shard, as far as that is known before the shard is finished."""

    @abstractmethod
    def begin(self, file: BinaryIO) -> None:
        """A new shard begins."""

    @abstractmethod
    def add(self, encoded: Any) -> None:
        """The shard's next sample."""

    @abstractmethod
    def finish(self) -> tuple[Block, ...] | None:
        """The shard ends. Returns its blocks, as the format's ``index`` finds them, or None to have it find them."""
