"""Samplers that draw from samplers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def nested_samplers(sampler: Any) -> Iterator[Any]:
    """A sampler, and those that it draws from, such as a ``BatchSampler``'s; Accelerate's draw batches.

    Each once: a mock has an endless line of them, and none is asked for its length, which some refuse to say.
    """
    found: list[Any] = []
    while sampler is not None and len(found) < 16 and all(sampler is not each for each in found):
        yield sampler
        found.append(sampler)
        below = getattr(sampler, "sampler", None)
        sampler = getattr(sampler, "batch_sampler", None) if below is None else below
