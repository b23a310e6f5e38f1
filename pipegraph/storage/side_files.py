"""The files that lie beside shards, and the folders whose pack has not ended.

Their names begin with ``_``: pyarrow, pandas and Hugging Face's datasets skip such files where they read a folder.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
from collections.abc import Mapping
from typing import Any, Final

from pipegraph.errors import DataError

MANIFEST: Final = "_manifest.json"
SETTINGS: Final = "_pack.json"
"""The settings of a pack that is complete."""
JOURNAL: Final = "_pack.json.partial"
"""What a pack that is not complete has finished: a JSON object per line, the first with its settings."""


def unfinished_pack(folder: str) -> str | None:
    """Where the journal of a pack that has not ended lies, if there is one in this folder."""
    path = os.path.join(folder, JOURNAL)
    # A process that was killed behind its last step has written the settings and left the journal.
    ended = not os.path.isfile(path) or os.path.exists(os.path.join(folder, SETTINGS))
    return None if ended else path


def refuse_unfinished(folder: str) -> None:
    """Raises DataError for the folder of a pack that has not ended, with the call that continues it."""
    path = unfinished_pack(folder)
    if path is not None:
        raise unfinished(folder, continuation(folder, path))


def unfinished(folder: str, continuation: str) -> DataError:
    """The refusal of a folder whose pack has not ended."""
    return DataError(
        f"{folder!r}: the pack into this folder has not ended, it is still running or was stopped, so that shards are "
        f"missing; wait for it, or continue it with {continuation}"
    )


def _first_record(path: str) -> Mapping[str, Any]:
    """Of a journal; empty where a process was stopped before, or while, it wrote it, and where it has just ended."""
    try:
        with open(path, "rb") as lines:
            record = json.loads(next((line for line in itertools.islice(lines, 100) if line.strip()), b"{}"))
    except (FileNotFoundError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def continuation(folder: str, journal: str) -> str:
    """The call that continues the pack into a folder, by its journal."""
    record = _first_record(journal)
    settings = record.get("settings")
    if not isinstance(settings, dict):
        return "the call that began it"
    format, size, shuffle = (settings.get(name) for name in ("format", "size", "shuffle"))
    if settings.get("source") is None:
        return f"the same samples through pg.ShardWriter({folder!r}, format={format!r}, size={size})"
    given = record.get("given")
    if given is None:
        more = "" if shuffle is None else f", shuffle={shuffle}"
        return f"pack_shards(the same source, {folder!r}, format={format!r}, size={size}{more})"
    words = ["pipegraph", "pack", given, folder, "--format", str(format), "--size", str(size)]
    if shuffle is not None:
        words += ["--shuffle", "--seed", str(shuffle)]
    return f"`{shlex.join(words)}`"
