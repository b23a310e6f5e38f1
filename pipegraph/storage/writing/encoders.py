"""The encoder of each format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pipegraph.errors import GraphError
from pipegraph.storage.manifest import PartIndex

from .encoder import Encoder
from .field_kinds import Kinds
from .mds_encoder import MdsEncoder
from .parquet_encoder import ParquetEncoder
from .tar_encoder import TarEncoder

_ENCODERS: Final[dict[str, Callable[[Kinds, int], Encoder]]] = {
    "tar": lambda kinds, size: TarEncoder(),
    "parquet": lambda kinds, size: ParquetEncoder(kinds),
    "mds": MdsEncoder,
}
FORMATS: Final = tuple(_ENCODERS)


def check_format(format: str) -> str:
    """The format's name.

    Raises:
        GraphError: there is no such format.
    """
    if format not in _ENCODERS:
        raise GraphError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    return format


def encoder_for(format: str, kinds: Kinds, size: int) -> Encoder:
    """A new encoder.

    Args:
        kinds: of the fields; formats without columns do not ask for them.
        size: about how many bytes a shard has.
    """
    return _ENCODERS[format](kinds, size)


def has_columns(format: str) -> bool:
    """Whether all samples of the format have the same fields, of one kind each."""
    return format != "tar"


def index_json(encoder: Encoder, shards: Mapping[int, PartIndex]) -> dict[str, Any] | None:
    """What else a format wants beside its shards."""
    if not isinstance(encoder, MdsEncoder):
        return None
    entries = [
        encoder.index_entry(index.part.name, index.part.size or 0, index.samples)
        for _, index in sorted(shards.items())
    ]
    return {"shards": entries, "version": 2}
