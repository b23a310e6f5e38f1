"""Packs a whole dataset into shards: reads files ahead, and gives the samples to a `ShardWriter`.

A stopped run leaves whole shards; the next one goes on behind them.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np

from pipegraph.errors import DataError, GraphError, note
from pipegraph.integers import integer
from pipegraph.order.permutation import key64, permute_one
from pipegraph.paths import PATHS, path_of
from pipegraph.storage.folders import list_files
from pipegraph.storage.formats.tar import split_key
from pipegraph.storage.manifest import Manifest
from pipegraph.storage.shard_files import read_file

from .encoders import Sample
from .shard_writer import SIZE, STREAM, ShardWriter

_READERS: Final = 8
"""Files read at the same time."""

_GIVE: Final = (
    "give a folder of files, a dataset or an iterable of dicts; the samples of shards are those of a graph that reads "
    "them, see docs/formats.md"
)


@dataclass(frozen=True, slots=True)
class PackProgress:
    """How far `pack_shards` is: shards and samples that are written, and how many samples there are, None for a
    stream.
    """

    shards: int
    samples: int
    total: int | None


def pack_shards(
    source: Any,
    target: str | os.PathLike[str],
    *,
    format: str = "tar",
    size: int | str = SIZE,
    shuffle: int | None = None,
    progress: Callable[[PackProgress], None] | None = None,
) -> Manifest:
    """Write a dataset as shards, with their manifest.

    The same call after a crash or an interrupt writes only what is missing, a stream all of it again; one on a complete
    folder changes nothing. What is slow to make comes from a graph with workers, whose samples are a stream.

    Args:
        source: a folder of files, a dataset with
            ``__len__`` and ``__getitem__``, an iterable of dicts, or a function that returns one of these.
        target: the folder for the shards.
        format: one of those of docs/formats.md, ``"tar"`` or ``"parquet"``.
        size: about how large shards are, in bytes or such as ``"128 MB"``.
        shuffle: a seed: the samples are written in an order drawn from it.
        progress: called in this thread after each shard.

    Raises:
        DataError: the source is empty, a sample has no place in the format, or the folder holds something else.
        GraphError: an argument is none.
    """
    if shuffle is not None:
        shuffle = integer(shuffle, "pack: shuffle", 0, "must be a seed, an int >= {}")
    found = source_of(source)
    facts: Any = STREAM
    total = None
    if isinstance(found, PackSource):
        facts, total = {**found.describe(), "shuffle": shuffle}, len(found)
        if not total:
            raise DataError("pack: the source has no samples")
    elif shuffle is not None:
        raise GraphError(
            "pack: a stream cannot be shuffled as it passes; write it to shards, then pack those with a shuffle"
        )
    with ShardWriter(target, format, size, source=facts) as writer:
        if not writer.complete:
            if isinstance(found, PackSource):
                writer.classes = found.classes
                found = found.samples(shuffle, writer.written)
            shards = -1
            for sample in found:
                if progress and writer.shards != shards:
                    shards = writer.shards
                    progress(PackProgress(shards, writer.written, total))
                writer.write(sample)
        return writer.close()


class PackSource:
    """A dataset with ``__len__`` and ``__getitem__``. Samples that are tuples have the fields ``"0"``, ``"1"`` ...

    Attributes:
        classes: the names of the classes that labels number.
        readers: threads that may read at the same time.
    """

    classes: tuple[str, ...] = ()
    readers = 1

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def describe(self) -> dict[str, Any]:
        """JSON by which the same data is known: a stopped pack is resumed with it, and no other."""
        facts = {"dataset": type(self.dataset).__qualname__, "samples": len(self.dataset)}
        fingerprint = getattr(self.dataset, "_fingerprint", None)  # Hugging Face's
        return {**facts, "fingerprint": fingerprint} if isinstance(fingerprint, str) else facts

    def read(self, number: int) -> Sample:
        """One sample."""
        return as_sample(self.dataset[number])

    def samples(self, seed: int | None, start: int) -> Iterator[Sample]:
        """All samples from place ``start`` of their order on, read ahead."""
        order = np.arange(start, len(self), dtype=np.int64)
        if seed is not None:
            order = permute_one(order, len(self), key64("pack", seed))
        numbers = iter(order.tolist())
        if self.readers == 1:
            yield from map(self._read, numbers)
            return
        with ThreadPoolExecutor(self.readers, thread_name_prefix="pipegraph-pack") as pool:
            ahead = deque(pool.submit(self._read, number) for number in islice(numbers, 8 * self.readers))
            try:
                while ahead:
                    yield ahead.popleft().result()
                    ahead.extend(pool.submit(self._read, number) for number in islice(numbers, 1))
            finally:
                pool.shutdown(cancel_futures=True)

    def _read(self, number: int) -> Sample:
        try:
            return self.read(number)
        except Exception as error:
            note(error, f"sample {number} of the source, which says that it has {len(self)}")
            raise


class FilesSource(PackSource):
    """Files: those of one sample share the path up to the first dot of the last component."""

    readers = _READERS

    def __init__(self, root: str) -> None:
        files = list_files(root)
        self.root, labels = files.root, None if files.labels is None else files.labels.tolist()
        samples: dict[str, dict[str, Any]] = {}
        facts: list[str] = []
        if any(path.endswith(".cls") for path in files.paths):
            labels = None  # samples with labels of their own
        for place, path in enumerate(files.paths):
            name, split = f"{self.root}/{path}", split_key(path)
            if split is None:
                raise DataError(
                    f"{name!r}: a file's ending says what it is in its sample, and this one has none; rename it, or "
                    "move it out of the folder"
                )
            status = os.stat(name)
            facts.append(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n")
            key, field = split
            field = "_key" if field == "key" else field  # as the reader of a tar names it
            entry = samples.setdefault(key, {} if labels is None else {"label": labels[place]})
            if field in entry:
                raise DataError(
                    f"{name!r}: the sample {key!r} has the field {field!r} twice, or a label from its class folder "
                    "too; give this file another ending"
                )
            entry[field] = path
        self.classes = () if labels is None else files.classes
        text = "".join(facts).encode("utf-8", "surrogateescape")
        self._digest = hashlib.blake2b(text, digest_size=16).hexdigest()
        super().__init__(list(samples.items()))

    def describe(self) -> dict[str, Any]:
        return {"files": len(self), "digest": self._digest}

    def read(self, number: int) -> Sample:
        key, entry = self.dataset[number]
        sample: dict[str, Any] = {"key": key}
        for field, value in entry.items():
            sample[field] = read_file(f"{self.root}/{value}") if isinstance(value, str) else value
        return sample


def as_sample(item: Any) -> Sample:
    """A dict of fields."""
    if isinstance(item, Mapping):
        return item
    if isinstance(item, tuple | list):
        return {str(place): value for place, value in enumerate(item)}
    raise DataError(
        f"a sample is a dict of fields or a tuple, got {type(item).__name__}; wrap it: {{'text': item}}"
    )


def source_of(given: Any) -> PackSource | Iterator[Sample]:
    """What a user has named, as something that can be packed; see ``pack_shards``."""
    if callable(given) and not hasattr(type(given), "__iter__") and not hasattr(given, "__getitem__"):
        given = given()
    if isinstance(given, PackSource):
        return given
    if isinstance(given, PATHS):
        return FilesSource(path_of(given, "pack: source"))
    if hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, Mapping):
        return PackSource(given)
    if isinstance(given, Iterable) and not isinstance(given, Mapping):
        return map(as_sample, given)
    raise DataError(f"a {type(given).__name__} cannot be packed; {_GIVE}")
