"""Samplers that draw from samplers, and their states."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral
from typing import Any

import torch


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


def generators_of(sampler: Any) -> list[torch.Generator]:
    """Torch's generators that a sampler holds, whatever it calls them; ``generator`` first."""
    held = (getattr(sampler, "generator", None), *getattr(sampler, "__dict__", {}).values())
    return list({id(each): each for each in held if isinstance(each, torch.Generator)}.values())


def seed_of(sampler: Any) -> int | None:
    """The seed that a sampler shuffles by, as torch's ``DistributedSampler`` has it; None if it has none."""
    for each in nested_samplers(sampler):
        seed = (
            getattr(each, "seed", None)
            if hasattr(each, "set_epoch") and getattr(each, "shuffle", True)
            else None
        )
        if type(seed) is int:
            return seed
    return None


def keeps_state(thing: Any) -> bool:
    """Whether it has a state and can be restored. A network's ``state_dict`` is another matter."""
    methods = getattr(thing, "state_dict", None), getattr(thing, "load_state_dict", None)
    return all(map(callable, methods)) and not isinstance(thing, torch.nn.Module)


def plain_indices(value: Any) -> Any:
    """Indices as JSON gives them back; None where they are anything else than numbers, texts and lists of these."""
    if isinstance(value, list | tuple):
        found = [plain_indices(each) for each in value]
        return None if None in found else found
    return int(value) if isinstance(value, Integral) else value if isinstance(value, str) else None
