"""The contract of a shard format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from pipegraph.storage.files import ShardFile

Sample = dict[str, Any]

# Blocks of 64 to 256 MB: large enough that a request's latency does not
# matter, small enough that a rank can hold a lane's worth of them.
BLOCK_NBYTES: Final = 128 * 1000 * 1000

# A single field above this is taken for an attack or a broken file.
MAX_FIELD_NBYTES: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class Block:
    """A run of whole samples that lie together in a part.

    Args:
        offset: first byte in the part.
        nbytes: length in bytes.
        first: number of its first sample in the part.
        samples: how many.
    """

    offset: int
    nbytes: int
    first: int
    samples: int


class Format(ABC):
    """How the samples of one kind of shard are found and read.

    Instances hold no state between calls; any thread may use one. Nothing
    read from a shard is ever unpickled or executed, and lengths found in it are
    checked against the file's size before memory is taken for them.
    """

    suffixes: ClassVar[tuple[str, ...]]
    """File name endings, with the dot, in lower case."""

    @abstractmethod
    def samples(self, file: ShardFile) -> Iterator[Sample]:
        """All samples in order, read as a stream.

        Raises:
            ShardError: the shard is broken or hostile; names file and place.
        """

    @abstractmethod
    def index(self, file: ShardFile, block_nbytes: int = BLOCK_NBYTES) -> list[Block]:
        """The blocks of a part, together every sample once, each of about `block_nbytes`.

        Reads headers only where the format allows it.
        """

    @abstractmethod
    def read(self, file: ShardFile, block: Block) -> Sequence[Sample]:
        """The samples of one block with random access: each is read when it is asked for.

        The sequence stays valid while `file` is open.
        """
