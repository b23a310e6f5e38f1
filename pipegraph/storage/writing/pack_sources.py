"""Inputs of a pack: files, datasets, streams."""

from __future__ import annotations

import hashlib
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from stat import S_ISREG
from typing import Any, Final

import numpy as np

from pipegraph.errors import DataError, extra_module
from pipegraph.paths import PATHS, broken_link, path_of
from pipegraph.storage.folders import list_files
from pipegraph.storage.formats import known_suffixes
from pipegraph.storage.formats.tar import split_key
from pipegraph.storage.read_file import read_file

from .encoder import Sample
from .field_kinds import refuse_odd_names
from .tar_encoder import member_nbytes

_GIVE: Final = (
    "give a folder of files, a dataset or an iterable of dicts; the samples of shards are those of a graph that reads "
    "them, see docs/formats.md"
)


class PackSource(ABC):
    """Samples by their number: each worker reads its own. ``nbytes``: of each in a tar, int64, where that is known;
    ``classes``: the names of the classes that labels number.
    """

    classes: tuple[str, ...] = ()
    nbytes: np.ndarray[Any, np.dtype[np.int64]] | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Samples."""

    @abstractmethod
    def read(self, number: int) -> Sample:
        """One sample."""

    @abstractmethod
    def describe(self) -> Any:
        """JSON by which the same data is known: a stopped pack is resumed with it, and no other."""


class FilesSource(PackSource):
    """Files: those of one sample share the path up to the first dot of the last component."""

    def __init__(self, root: str) -> None:
        files = list_files(root)
        self.root, labels = files.root, None if files.labels is None else files.labels.tolist()
        samples: dict[str, dict[str, Any]] = {}
        facts: list[str] = []
        shard = next(
            (path for path in files.paths if path.lower().endswith(known_suffixes(holds_samples=True))), None
        )
        if shard is not None:
            raise DataError(f"{root!r} holds the shard {shard!r}; {_GIVE}")
        if any(path.endswith(".cls") for path in files.paths):
            labels = None  # samples with labels of their own
        for place, path in enumerate(files.paths):
            name, split = f"{self.root}/{path}", split_key(path)
            if split is None:
                raise DataError(
                    f"{name!r}: a file's ending says what it is in its sample, and this one has none; rename it, or "
                    "move it out of the folder"
                )
            status = _status(name)
            facts.append(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n")
            key, field = split
            field = "_key" if field == "key" else field  # as the reader of a tar names it
            entry = samples.setdefault(key, {} if labels is None else {"label": labels[place]})
            if field in entry:
                raise DataError(
                    f"{name!r}: the sample {key!r} has the field {field!r} twice, or a label from its class folder "
                    "too; give this file another ending"
                )
            entry[field] = (path, status.st_size)
        self.classes = () if labels is None else files.classes
        text = "".join(facts).encode("utf-8", "surrogateescape")
        self._digest = hashlib.blake2b(text, digest_size=16).hexdigest()
        self._samples = list(samples.items())
        sizes = [
            member_nbytes([each[1] if isinstance(each, tuple) else 1 for each in entry.values()])
            for entry in samples.values()
        ]
        self.nbytes = np.array(sizes, np.int64)

    def __len__(self) -> int:
        return len(self._samples)

    def describe(self) -> Any:
        return {"files": len(self._samples), "digest": self._digest}

    def read(self, number: int) -> Sample:
        key, entry = self._samples[number]
        sample: dict[str, Any] = {"key": key}
        for field, value in entry.items():
            sample[field] = (
                _content(f"{self.root}/{value[0]}", value[1]) if isinstance(value, tuple) else value
            )
        return sample


def _status(path: str) -> os.stat_result:
    """Of a file that can be packed."""
    try:
        status = os.stat(path)
    except OSError as error:
        target = broken_link(path)
        link = "" if target is None else f", which is a link to {target!r}"
        raise DataError(f"{path!r}{link}: {error.strerror}; mend it, or move it out of the folder") from error
    if not S_ISREG(status.st_mode):
        raise DataError(f"{path!r} is no regular file (a pipe, a device or a folder); move it away")
    return status


def _content(path: str, nbytes: int) -> bytes:
    """All of a file that was listed with this size."""
    data = read_file(path)
    if len(data) != nbytes:
        raise DataError(
            f"{path!r}: had {nbytes} bytes when the files were listed, and has changed since; pack again"
        )
    return data


class SequenceSource(PackSource):
    """A dataset with ``__len__`` and ``__getitem__``. Samples that are tuples have the fields ``"0"``, ``"1"`` ..."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = _undecoded(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def describe(self) -> Any:
        fingerprint = getattr(self.dataset, "_fingerprint", None)  # Hugging Face's
        return {
            "dataset": type(self.dataset).__qualname__,
            "samples": len(self.dataset),
            **({"fingerprint": fingerprint} if isinstance(fingerprint, str) else {}),
        }

    def read(self, number: int) -> Sample:
        return as_sample(self.dataset[number])


class PackedStream:
    """What can only be iterated: samples one after the other."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Sample]:
        return map(as_sample, self.items)


def as_sample(item: Any) -> Sample:
    """A dict of fields."""
    if isinstance(item, Mapping):
        refuse_odd_names(item)
        return item
    if isinstance(item, tuple | list):
        return {str(place): value for place, value in enumerate(item)}
    raise DataError(
        f"a sample is a dict of fields or a tuple, got {type(item).__name__}; wrap it: {{'text': item}}"
    )


def _undecoded(dataset: Any) -> Any:
    """A Hugging Face dataset whose images and sounds stay the bytes that they are stored as."""
    features = getattr(dataset, "features", None)
    if features is None or not hasattr(dataset, "cast_column"):
        return dataset
    module = importlib.import_module("datasets")
    encoded = [name for name, kind in features.items() if isinstance(kind, module.Image | module.Audio)]
    for name in encoded:
        dataset = dataset.cast_column(name, type(features[name])(decode=False))
    return _Encoded(dataset, encoded) if encoded else dataset


class _Encoded:
    """Takes the bytes out of ``{"bytes", "path"}``."""

    def __init__(self, dataset: Any, fields: Sequence[str]) -> None:
        self.dataset, self.fields = dataset, fields
        self._fingerprint = getattr(dataset, "_fingerprint", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        sample = dict(self.dataset[number])
        for field in self.fields:
            value = sample[field]
            if value is not None and value.get("bytes") is None:
                value = {"bytes": read_file(value["path"])}
            sample[field] = None if value is None else value["bytes"]
        return sample


def source_of(given: Any) -> PackSource | PackedStream:
    """What a user has named, as something that can be packed; see ``pack_shards``."""
    if callable(given) and not hasattr(type(given), "__iter__") and not hasattr(given, "__getitem__"):
        given = given()
    if isinstance(given, PackSource | PackedStream):
        return given
    if isinstance(given, PATHS):
        return _named(path_of(given, "pack: source"))
    if hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, Mapping):
        return SequenceSource(given)
    if isinstance(given, Iterable) and not isinstance(given, Mapping):
        return PackedStream(given)
    raise DataError(f"a {type(given).__name__} cannot be packed; {_GIVE}")


def _named(path: str) -> PackSource:
    if path.startswith("hf:"):
        name, _, split = path.removeprefix("hf:").partition(":")
        return SequenceSource(_datasets(path).load_dataset(name, split=split or "train"))
    if os.path.isdir(path):
        if os.path.isfile(os.path.join(path, "dataset_info.json")):
            return SequenceSource(_datasets(path).load_from_disk(path))
        return FilesSource(path)
    raise DataError(f"{path!r}: there is no such folder; {_GIVE}")


def _datasets(what: str) -> Any:
    return extra_module("datasets", "hf", f"packing {what}")
