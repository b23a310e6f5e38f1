"""The contract of a shard encoder: samples to the bytes of one shard."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from pipegraph.storage.formats.shard_format import Block

from .checksum_file import ChecksumFile

Sample = Mapping[str, Any]


class Encoder(ABC):
    """Writes one shard to a file. The same samples give the same bytes.

    Attributes:
        samples: written so far.
    """

    samples: int = 0

    @abstractmethod
    def encode(self, sample: Sample, number: int) -> Any:
        """What :meth:`add` takes, and of which :meth:`size` tells the bytes.

        Args:
            number: of the sample in the data set: its key, where it has none.

        Raises:
            DataError: the format has no place for a value; names the field.
        """

    @abstractmethod
    def size(self, encoded: Any) -> int:
        """The bytes that a sample adds to a shard, as far as that is known before the shard is finished."""

    @abstractmethod
    def begin(self, file: ChecksumFile) -> None:
        """A new shard begins."""

    @abstractmethod
    def add(self, encoded: Any) -> None:
        """The shard's next sample."""

    @abstractmethod
    def finish(self) -> tuple[Block, ...] | None:
        """The shard ends. Returns its blocks, or None where the shard is quickly asked for them.

        Blocks are those that the format's ``index`` finds.
        """
