"""State and epochs of Hugging Face's streaming data sets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def is_streaming(items: Any) -> bool:
    """Whether this is such a data set; ``datasets`` is not imported for it."""
    module = sys.modules.get("datasets")
    kind = getattr(module, "IterableDataset", None)
    return kind is not None and isinstance(items, kind)


def state_is_exact(items: Any) -> bool:
    """Whether its state holds all that decides what comes next.

    The rows in a shuffle buffer are not in it, nor, where rows are Arrow tables, those between two batches of a map:
    after a resume from such a state they would be lost.
    """
    formatting = getattr(items, "_formatting", None)
    if formatting is not None and formatting.is_table:
        return False
    return not any(
        type(step).__name__ == "BufferShuffledExamplesIterable" for step in _steps(items._ex_iterable)
    )


def _steps(step: Any) -> Iterator[Any]:
    yield step
    below = getattr(step, "ex_iterables", None) or (getattr(step, "ex_iterable", None),)
    for each in below:
        if each is not None:
            yield from _steps(each)


def forget_state(items: Any) -> None:
    """Let later passes start from their beginning: it would go back to a loaded state in each pass over its epoch."""
    items.load_state_dict(None)
