"""The types of a tar's fields: what our writer notes of a file in its header, and the values that such files hold.

A note is the name of the file's owner, which no reader of samples looks at. Files without one, such as those of other
writers, are bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from .arrays import array_in

NOTE: Final = slice(265, 281)
"""Its place in a header: the first half of ``uname``."""
BYTES: Final = bytes(16)
TEXT: Final = b"pipegraph.text\0\0"
JSON: Final = b"pipegraph.json\0\0"
ARRAY: Final = b"pipegraph.npy\0\0\0"

DECODERS: Final[Mapping[bytes, Callable[[bytes], Any]]] = {
    TEXT: bytes.decode,
    JSON: json.loads,
    ARRAY: array_in,
}
"""By note; they raise ValueError, RecursionError or ShardError."""
