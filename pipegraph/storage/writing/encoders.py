"""The encoder of each format."""

from __future__ import annotations

from typing import Final

from pipegraph.errors import GraphError

from .encoder import Encoder
from .mds_encoder import MdsEncoder
from .parquet_encoder import ParquetEncoder
from .tar_encoder import TarEncoder

_ENCODERS: Final = (TarEncoder, ParquetEncoder, MdsEncoder)


def encoder_of(format: str) -> type[Encoder]:
    """The encoder of a format."""
    known: dict[str, type[Encoder]] = {each.format: each for each in _ENCODERS}
    if format not in known:
        raise GraphError(f"format must be one of {', '.join(known)}, got {format!r}")
    return known[format]
