"""The position within a pass, which the state describes.

For a map-style dataset the state holds the random state from which the sampler drew (or will draw) the epoch's order,
and how many batches were delivered: a resumed pass draws the same order and skips that many, without reading a sample.
For an iterable, and for a dataset with a state of its own, it holds that of each worker's copy; an iterable without one
is read again up to the batches delivered.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from pipegraph.errors import PipegraphWarning, StateError
from pipegraph.loader.torch_dataloader.fetching import behind
from pipegraph.nested_samplers import generators_of, keeps_state, nested_samplers, plain_indices
from pipegraph.parameters import without_rewind

VERSION = 5

TRAINERS = ("accelerate", "lightning", "pytorch_lightning")
"""Packages whose samplers give what others draw, or draw by their seed and epoch."""

KEPT = ("base_seed", "before", "order", "copies", "turn")
"""What a state has of a :class:`BatchProgress` as it is."""


@dataclass(frozen=True)
class Remaining:
    """The batches of an epoch that are still to come: all but the ``first`` ones and those ``beyond`` these.

    Batches are numbered in the order of their indices; with ``in_order=False`` they are not delivered in that order.
    """

    first: int = 0
    beyond: frozenset[int] = frozenset()

    def number(self, step: int) -> int:
        """Of the batch that comes after ``step`` others, in the order of their indices."""
        number = self.first + step
        for each in sorted(self.beyond):
            number += each <= number
        return number

    def without(self, number: int) -> Remaining:
        """What remains when this batch, too, has been delivered."""
        first, beyond = self.first, self.beyond | {number}
        while first in beyond:
            beyond -= {first}
            first += 1
        return Remaining(first, beyond)

    def of(self, behind: Iterator[Any]) -> Iterator[Any]:
        """Those that remain of what follows the first ones."""
        if not self.beyond:
            return behind
        return (each for number, each in enumerate(behind, self.first) if number not in self.beyond)


@dataclass
class BatchProgress:
    """One pass.

    Attributes:
        options: of the loader, which decide what a batch is.
        remaining: the batches of this epoch that were not delivered yet.
        base_seed: of the workers, once the pass has begun.
        finished: whether the loop has run to its end.
        before: the random states at the beginning of a pass that has not begun.
        order: the random state that the epoch's order is drawn from, once it is known, and the sampler's own number of
            the epoch where it has one (``set_epoch``).
        copies: for each worker whose copy of the dataset has a state: ``[batches delivered, the copy's state]``, the
            latter None if it has not said.
        turn: the worker whose batch is next, where copies have states.
        superseded: whether the loader has loaded another state since, and has not begun its next pass yet.
    """

    options: dict[str, Any]
    remaining: Remaining = Remaining()
    base_seed: int | None = None
    before: dict[str, Any] = field(default_factory=dict)
    order: dict[str, Any] = field(default_factory=dict)
    copies: list[list[Any]] = field(default_factory=list)
    turn: int = 0
    finished: bool = False
    superseded: bool = False

    @property
    def begun(self) -> bool:
        """Whether batches of the epoch were delivered."""
        return bool(self.batches or self.remaining.beyond)

    @property
    def batches(self) -> int:
        """How many were delivered, of those whose predecessors were too."""
        return self.remaining.first

    def deliver(self, number: int | None = None) -> None:
        """The batch with this number was delivered; None: the first that remained."""
        self.remaining = self.remaining.without(self.batches if number is None else number)

    def deliver_of(self, worker: int, where: Any) -> None:
        """A batch of a worker was delivered; ``where`` its copy stands behind it."""
        self.copies[worker] = [self.copies[worker][0] + 1, where]
        self.turn = (worker + 1) % len(self.copies)

    def state(self, rank: int, shared: bool) -> dict[str, Any]:
        """With a fixed set of keys; JSON where the states of the dataset and the sampler are.

        What is the same on all ranks (``shared``) has one key for all, which other ranks find in a checkpoint, however
        many had saved it. A rank's part is in a tuple, which ``torch.distributed.checkpoint`` stores as one value: of a
        dict it would keep each entry by itself, and read only those that a new loader has too.
        """
        part = {"rank": rank, "batches": self.batches, "beyond": sorted(self.remaining.beyond)}
        part |= {name: copy.copy(getattr(self, name)) for name in KEPT}
        return {"version": VERSION, "options": dict(self.options), f"rank{0 if shared else rank}": (part,)}

    @staticmethod
    def of(state: Any, fresh: BatchProgress, rank: int) -> BatchProgress:
        """From a state, for a loader whose new pass is ``fresh``.

        Raises:
            StateError: it is none, of copies with states in another number of workers, or of the middle of an epoch
                with other options.
        """
        if not isinstance(state, dict) or "options" not in state or "version" not in state:
            raise StateError("this is not the state of a pg.DataLoader: it has no 'version' and 'options'")
        if state["version"] != VERSION:
            raise StateError(
                f"the state has version {state['version']!r}, this pipegraph reads version {VERSION}"
            )
        parts = {key: value for key, value in state.items() if key.startswith("rank")}
        if not parts:
            raise StateError("the state has no part of any rank")
        (part,) = parts.get(f"rank{rank}") or next(iter(parts.values()))
        if len(part["copies"]) != len(fresh.copies):
            raise StateError(
                f"the state has {len(part['copies'])} copies of a dataset, this loader has {len(fresh.copies)}: each "
                f"worker continues its own; resume with num_workers={len(part['copies'])}"
            )
        if f"rank{rank}" not in parts and any(where is not None for _, where in part["copies"]):
            warnings.warn(
                f"the state has no part of rank {rank}, only of {', '.join(parts)}, whose dataset's own state this "
                "rank takes over: if ranks read different data, save and load a state on every rank",
                PipegraphWarning,
                stacklevel=3,
            )
        kept = state["options"]
        remaining = Remaining(part["batches"], frozenset(part["beyond"]))
        found = BatchProgress(fresh.options, remaining, **{name: copy.copy(part[name]) for name in KEPT})
        if part["rank"] != rank:
            found.base_seed = None  # each rank draws its own
        for name, now in fresh.options.items() if found.begun else ():
            if kept[name] != now:
                raise StateError(
                    f"the state is of the middle of an epoch with {name}={kept[name]} and this loader has "
                    f"{name}={now}, so that other samples would remain: resume with {name}={kept[name]} and change "
                    "it between epochs"
                )
        return found


@dataclass
class Indices:
    """The indices of one epoch behind those delivered, drawn from a sampler; notes the random state that it had.

    Attributes:
        sampler: a loader's ``batch_sampler``, or its ``sampler``.
        progress: where the state is noted; one that was restored says where to begin.
    """

    sampler: Any
    progress: BatchProgress

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        progress, sampler = self.progress, self.sampler
        if progress.begun:
            _check_source(sampler, progress.order)
        restore_epoch(sampler, progress.order)
        restore_random_state(sampler, progress.order)
        with global_generator(progress.order.get("global")):
            order = progress.order or random_state(sampler)
            if "sampler" in order and (progress.order or progress.before):
                drawn = _put_back(sampler, order, progress.batches)
            else:
                drawn = behind(without_rewind(iter(sampler)), progress.batches)
            drawn = progress.remaining.of(drawn)
            progress.order = order
            first = list(islice(drawn, 1))  # most samplers draw the whole order here
            if first and "sampler" in order and "first" not in order:
                progress.order = {**order, "first": plain_indices(first[0])}
        yield from first
        yield from drawn


SOURCES = {
    "sampler": "a sampler with a state of its own",
    "generator": "a generator=",
    "global": "torch's global generator",
    "none": "a sampler that draws nothing",
}
"""Of what an order may be drawn, in words, by the name in :attr:`BatchProgress.order`."""


def _check_source(sampler: Any, order: dict[str, Any]) -> None:
    """A restored order must be drawn again from what it was drawn from.

    Raises:
        StateError: from another; other samples would remain. A sampler that knows the epoch needs nothing else.
    """
    if not order or "epoch" in order:
        return
    before, now = (
        " and ".join(SOURCES[name] for name in SOURCES if name in each)
        for each in (order, random_state(sampler))
    )
    if before != now:
        raise StateError(
            f"the state is of the middle of an epoch whose order was drawn from {before}, and this loader's would be "
            f"drawn from {now}, so that other samples would remain: resume with the generator= and sampler that it was "
            "saved with, and change them between epochs"
        )


def _put_back(sampler: Any, order: dict[str, Any], batches: int) -> Iterator[Any]:
    """The indices behind some batches, of a sampler that was put back to its state at the epoch's start.

    That state may be of the end of the epoch before, as torchdata's samplers have it: then the sampler first finishes
    that one, and its next iteration is the order. ``order["first"]`` is the first index of it.

    Raises:
        StateError: it begins with another.
    """
    expected = order.get("first")
    for _ in range(2):
        drawn = without_rewind(iter(sampler))
        first = list(islice(drawn, 1))
        plain = plain_indices(first[0]) if first else None
        if first and expected in (plain, None):
            order["first"] = plain
            return behind(chain(first, drawn), batches)
        restore_random_state(sampler, {name: order[name] for name in ("generator",) if name in order})
        if "global" in order:
            torch.set_rng_state(tensor_of(order["global"]))
    if expected is not None:
        kind = next(type(each).__qualname__ for each in nested_samplers(sampler) if keeps_state(each))
        raise StateError(
            f"the sampler of this pg.DataLoader, a {kind}, begins with {plain} where the state has {expected}: its "
            "load_state_dict must put it to where it draws the same indices again"
        )
    return iter(())


def random_state(sampler: Any) -> dict[str, Any]:
    """What a sampler would draw its order from now: its generator, its own state, the global generator.

    From the latter where any of the nested ones may: it has neither of the others, and is not known to draw nothing.
    """
    found: dict[str, Any] = {}
    epoch: dict[str, int] = {}
    draws = False
    for each in nested_samplers(sampler):
        of_its_own = _draws_nothing(each)
        if keeps_state(each):
            found["sampler"] = copy.deepcopy(each.state_dict())
            of_its_own = True
        if generators := generators_of(each):
            found["generator"] = text_of(generators[0].get_state())
            of_its_own = True
        if _has_epoch(each):
            epoch = {"epoch": each.epoch}
        draws |= not of_its_own
    if draws:
        found["global"] = text_of(torch.get_rng_state())
    return found | epoch or {"none": ""}


def _draws_nothing(sampler: Any) -> bool:
    """Whether it is torch's, or a trainer's around the user's own, and draws from no generator but its own."""
    kinds = (SequentialSampler, DistributedSampler, BatchSampler, list, tuple, range)
    return type(sampler) in kinds or type(sampler).__module__.partition(".")[0] in TRAINERS


def replicas_of(sampler: Any) -> int | None:
    """Among how many ranks a sampler splits the samples; None if it does not say."""
    for each in nested_samplers(sampler):
        for name in ("num_replicas", "num_processes"):  # Accelerate's is the latter
            if type(found := getattr(each, name, None)) is int:
                return found
    return None


def _has_epoch(sampler: Any) -> bool:
    return callable(getattr(sampler, "set_epoch", None)) and type(getattr(sampler, "epoch", None)) is int


def restore_epoch(sampler: Any, order: dict[str, Any]) -> None:
    """Set a sampler to the epoch of a state: a script whose checkpoint says ``epoch + 1`` sets another.

    In that one its order would be another, of which the batches that are left out are not those that were delivered.
    """
    for each in nested_samplers(sampler) if "epoch" in order else ():
        if _has_epoch(each) and each.epoch != order["epoch"]:
            warnings.warn(
                f"the state of this pg.DataLoader is of the middle of epoch {order['epoch']} and its sampler was set "
                f"to epoch {each.epoch}: the rest of epoch {order['epoch']} is delivered. A checkpoint that is "
                "saved within an epoch keeps `epoch`, and not `epoch + 1`",
                stacklevel=2,
            )
            each.set_epoch(order["epoch"])


def restore_random_state(sampler: Any, order: dict[str, Any]) -> None:
    """Restore a sampler's own generator and state."""
    for each in nested_samplers(sampler):
        if "sampler" in order and keeps_state(each):
            each.load_state_dict(copy.deepcopy(order["sampler"]))
        if "generator" in order and (generators := generators_of(each)):
            generators[0].set_state(tensor_of(order["generator"]))


@contextlib.contextmanager
def global_generator(text: str | None) -> Iterator[None]:
    """Put torch's global generator back to an earlier state, for the draws of a resumed epoch's order.

    It stays behind these, as it was when the epoch began: so the next epochs have the orders that they would have had,
    and a script that seeds itself at its start repeats none. None leaves it as it is.
    """
    if text is None:
        yield
        return
    now = torch.get_rng_state()
    torch.set_rng_state(tensor_of(text))
    try:
        yield
    except BaseException:
        torch.set_rng_state(now)
        raise


def text_of(state: torch.Tensor) -> str:
    """The state of a generator as text."""
    return base64.b64encode(state.numpy().tobytes()).decode()


def tensor_of(text: str) -> torch.Tensor:
    """The inverse of :func:`text_of`."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
