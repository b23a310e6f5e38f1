"""The contract of a shard format."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar, overload

from pipegraph.columns import Columns, Decode, EncodedRows
from pipegraph.errors import DataError, GraphError, ShardError
from pipegraph.storage.shard_files import ShardFile

Sample = dict[str, Any]
Row = TypeVar("Row")

# One range of a store: as much throughput as with larger blocks, and a first batch, which needs a block of
# each lane, many times earlier.
BLOCK_NBYTES: Final = 8 * 1000 * 1000

# What one part or block may grow to when it is unpacked in memory: a thousand
# times more fits in a gz of the same size that is made for harm.
MAX_UNPACKED_NBYTES: Final = 1 << 31

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

    def check(self, what: str, found: int, unit: str = "samples") -> None:
        """Raise ShardError unless ``what`` holds as many samples as the block should."""
        if found != self.samples:
            raise ShardError(
                f"{what} holds {found} {unit}, its index says {self.samples}; make the index anew"
            )


def blocks_between(starts: Iterable[int], block_nbytes: int) -> Iterator[Block]:
    """Runs of whole samples of about ``block_nbytes``, by where each one starts and the last one ends."""
    first = count = 0
    start = end = -1
    for next_start in starts:
        if count and next_start - start > block_nbytes and count > first + 1:
            yield Block(start, end - start, first, count - 1 - first)
            first, start = count - 1, end
        elif start < 0:
            start = next_start
        end = next_start
        count += 1
    if count - 1 > first:
        yield Block(start, end - start, first, count - 1 - first)


Room = Callable[[int], None]
"""Called with the bytes held so far; waits until there is room for them, and raises where there never is."""


class BlockSamples(Sequence[Row]):
    """The samples of one block, each made when it is asked for. A format says how many, and how one is made."""

    at_once = 1
    """How many to ask :meth:`rows` for where all are wanted: several where they cost little more than one."""
    nbytes: int = -1
    """What it holds in memory beside the file; -1 where that is what its format says."""

    @abstractmethod
    def sample(self, index: int) -> Row:
        """One sample, 0 <= ``index`` < ``len``; raises ShardError, with file and place, if it is broken."""

    def run(self, start: int, stop: int) -> list[Row]:
        """Samples that lie one behind the other, at least one; in one read where a format can."""
        return [self.sample(index) for index in range(start, stop)]

    def rows(self, indices: Any) -> list[Row]:
        """Some samples, by int64 indices, in their order."""
        return [self.sample(index) for index in indices.tolist()]

    def columns(self, indices: Any) -> Columns | None:
        """Some samples, by int64 indices, packed for a ``Batch``; None where they are read one by one."""
        return None

    def encoded(self, indices: Any) -> EncodedRows | None:
        """Some samples, by int64 indices, not decoded yet; None where they are none that another process can decode."""
        return None

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        count = len(self)
        if isinstance(index, slice):
            start, stop, step = index.indices(count)
            if step == 1 and start < stop:
                return self.run(start, stop)
            return [self.sample(each) for each in range(start, stop, step)]
        if not -count <= index < count:
            raise IndexError(f"block of {count} samples has no sample {index}")
        return self.sample(index % count)


class PlacedRows(BlockSamples[Sample]):
    """Samples that lie one behind the other, each decoded from its own bytes and their place in the file.

    ``places`` says where each begins, from ``start`` on, and at last where the last one ends. ``anywhere``: another
    process can decode them too.
    """

    def __init__(
        self, file: ShardFile, start: int, places: Sequence[int], decode: Decode, anywhere: bool = False
    ) -> None:
        self.file, self._start, self._decode, self._anywhere = file, start, decode, anywhere
        # An entry of NumPy's arrays costs more to read.
        self._places = array("I" if places[-1] < 1 << 32 else "Q", places)
        self.nbytes = len(self._places) * self._places.itemsize

    def __len__(self) -> int:
        return len(self._places) - 1

    def sample(self, index: int) -> Sample:
        found: Sample = self._decode(*self._read(index))
        return found

    def encoded(self, indices: Any) -> EncodedRows | None:
        if not self._anywhere:
            return None
        read = [self._read(index) for index in indices.tolist()]
        return EncodedRows(self._decode, [each[0] for each in read], [each[1:] for each in read])

    def _read(self, index: int) -> tuple[bytes, str, int]:
        first, stop = self._places[index], self._places[index + 1]
        at = self._start + first
        return self.file.read_at(at, stop - first), self.file.name, at

    def run(self, start: int, stop: int) -> list[Sample]:
        places = self._places[start : stop + 1].tolist()
        base, first = self._start + places[0], places[0]
        data = self.file.read_at(base, places[-1] - first)  # one read
        return [
            self._decode(data[a - first : b - first], self.file.name, self._start + a)
            for a, b in itertools.pairwise(places)
        ]


def check_columns(wanted: Sequence[str] | None, there: Sequence[str], name: str) -> None:
    """Raises DataError where a file lacks a column that ``Load`` asks for."""
    missing = next((each for each in wanted or () if each not in there), None)
    if missing is not None:
        raise DataError(
            f"{name}: Load asks for the column {missing!r}; there are {', '.join(map(repr, there))}"
        )


class Format(ABC):
    """How the samples of one kind of shard are found and read.

    Instances hold no state between calls, so they are thread-safe. Nothing
    read from a shard is ever unpickled or executed, and lengths found in it are
    checked against the file's size before memory is taken for them.
    """

    suffixes: tuple[str, ...]
    """File name endings, with the dot, in lower case."""

    in_place: bool = False
    """Whether `read` holds no more than where samples lie: each is read from the file when it is asked for."""

    needs_file: bool = True
    """Whether what `read` gives reads from its file later on."""

    columnar: bool = False
    """Whether what `read` gives has columns, which can be taken without making samples."""

    _room: Room | None = None

    def samples(self, file: ShardFile) -> Iterator[Sample]:
        """All samples in order, read as a stream: by default block by block.

        Raises:
            ShardError: the shard is broken or hostile; names file and place.
        """
        for block in self.index(file, file.stream_nbytes):
            yield from self.read(file, block)[:]

    @abstractmethod
    def index(self, file: ShardFile, block_nbytes: int = BLOCK_NBYTES) -> Iterator[Block]:
        """The blocks of a part in order, together every sample once, each of about `block_nbytes`.

        Reads headers only where the format allows it, and yields a block as soon as
        its end is known, so that its bytes can be checksummed on the same pass.

        Raises:
            ShardError: as `samples`.
        """

    @abstractmethod
    def read(self, file: ShardFile, block: Block) -> Sequence[Sample]:
        """The samples of one block with random access: each is read when it is asked for.

        The sequence stays valid while `file` is open.
        """

    def held_nbytes(self, samples: Sequence[Sample], block: Block) -> int:
        """What the result of `read` holds in memory, beside the file."""
        if isinstance(samples, BlockSamples) and samples.nbytes >= 0:
            return samples.nbytes
        return 0 if self.in_place else block.nbytes

    def choosing(self, columns: Sequence[str]) -> Format:
        """This format, reading these columns.

        Raises:
            GraphError: its samples have no columns.
        """
        raise GraphError(
            f"Load(columns=...): {'/'.join(self.suffixes)} shards have no columns that could be read alone; "
            "leave it out and put a Map behind Load"
        )

    def within(self, room: Room) -> Self:
        """This format, asking for room as `read` takes memory."""
        bounded = copy.copy(self)
        bounded._room = room
        return bounded

    def take_room(self, nbytes: int, name: str) -> None:
        """For `read`: reports how many bytes are held by now, or are about to be.

        Raises:
            ShardError: more than any part may unpack to.
            MemoryLimitError: more than the loader may hold.
        """
        if nbytes > MAX_UNPACKED_NBYTES:
            raise ShardError(
                f"{name}: unpacks to more than {MAX_UNPACKED_NBYTES} bytes, and is held in memory for random access; "
                "cut it into smaller parts or row groups"
            )
        if self._room is not None:
            self._room(nbytes)
