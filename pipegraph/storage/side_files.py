"""The files that lie beside shards, and the folders whose pack has not ended.

Their names begin with ``_``: pyarrow, pandas and Hugging Face's datasets skip such files where they read a folder.
"""

from __future__ import annotations

import os
from typing import Final

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
    """Raises DataError for the folder of a pack that has not ended."""
    if unfinished_pack(folder) is not None:
        raise unfinished(folder, "")


def unfinished(folder: str, more: str) -> DataError:
    """The refusal of a folder whose pack has not ended."""
    return DataError(
        f"{folder!r}: the pack into this folder has not ended, it is still running or was stopped, so that shards are "
        f"missing; wait for it, or make the call that began it again{more}: it writes the rest"
    )
