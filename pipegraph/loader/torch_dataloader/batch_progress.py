"""The position within a pass, which the state describes.

For indices the state holds the random state from which the sampler drew the epoch's order, and how many batches were
delivered: a resumed pass draws the same order and begins behind them, without reading a sample. Before an order is
drawn it holds the random state from which it would be. For an iterable, and for a data set with a state of its own, it
holds what each worker's copy says of itself; an iterable without one is read again behind the batches delivered.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from numbers import Integral
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from pipegraph.errors import PipegraphWarning, StateError

VERSION = 3


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
        copies: for each worker whose copy of the data set has a state: the batches delivered, and where the copy
            stands, if it says so.
        turn: the worker whose batch is next, where copies have states.
    """

    options: dict[str, Any]
    remaining: Remaining = Remaining()
    base_seed: int | None = None
    before: dict[str, Any] = field(default_factory=dict)
    order: dict[str, Any] = field(default_factory=dict)
    copies: list[tuple[int, Any]] = field(default_factory=list)
    turn: int = 0
    finished: bool = False

    @property
    def batches(self) -> int:
        """How many were delivered, of those whose predecessors were too."""
        return self.remaining.first

    def deliver(self, number: int | None = None) -> None:
        """The batch with this number was delivered; None: the first that remained."""
        self.remaining = self.remaining.without(self.batches if number is None else number)

    def deliver_of(self, worker: int, where: Any) -> None:
        """A batch of a worker was delivered; ``where`` its copy stands behind it."""
        self.copies[worker] = (self.copies[worker][0] + 1, where)
        self.turn = (worker + 1) % len(self.copies)

    def state(self, rank: int) -> dict[str, Any]:
        """With a fixed set of keys; JSON where the data set's and the sampler's own states are.

        A rank's part is in a tuple, which ``torch.distributed.checkpoint`` stores as one value: of a dict it would keep
        each entry by itself, and read only those that a new loader has too.
        """
        part = {
            "batches": self.batches,
            "beyond": sorted(self.remaining.beyond),
            "base_seed": self.base_seed,
            "before": dict(self.before),
            "order": dict(self.order),
            "copies": [list(each) for each in self.copies],
            "turn": self.turn,
        }
        return {"version": VERSION, "options": dict(self.options), f"rank{rank}": (part,)}

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
                f"the state has {len(part['copies'])} copies of a data set, this loader has {len(fresh.copies)}: each "
                f"worker continues its own; resume with num_workers={len(part['copies'])}"
            )
        if f"rank{rank}" not in parts and any(where is not None for _, where in part["copies"]):
            warnings.warn(
                f"the state has no part of rank {rank}, only of {', '.join(parts)}, whose data set's own state this "
                "rank takes over: if ranks read different data, save and load a state on every rank",
                PipegraphWarning,
                stacklevel=3,
            )
        kept = state["options"]
        for name, now in fresh.options.items() if part["batches"] or part["beyond"] else ():
            if kept[name] != now:
                raise StateError(
                    f"the state is of the middle of an epoch with {name}={kept[name]} and this loader has "
                    f"{name}={now}, so that other samples would remain: resume with {name}={kept[name]} and change "
                    "it between epochs"
                )
        return BatchProgress(
            options=fresh.options,
            remaining=Remaining(part["batches"], frozenset(part["beyond"])),
            base_seed=part["base_seed"],
            before=dict(part["before"]),
            order=dict(part["order"]),
            copies=[(done, where) for done, where in part["copies"]],
            turn=part["turn"],
        )


class Indices:
    """The indices of one epoch, drawn from a sampler; notes the random state that they are drawn from.

    Args:
        sampler: a loader's ``batch_sampler``, or its ``sampler``.
        progress: where the state is noted; one that was restored says where to begin.
    """

    def __init__(self, sampler: Any, progress: BatchProgress) -> None:
        self._sampler = sampler
        self._progress = progress
        self._drawn: Iterator[Any] | None = None

    def __iter__(self) -> Indices:
        return self

    def begin(self) -> None:
        """Draw the order now, and not with the first index."""
        first = list(islice(self, 1))
        assert self._drawn is not None
        self._drawn = chain(first, self._drawn)

    def __next__(self) -> Any:
        if self._drawn is None:
            progress = self._progress
            restore_epoch(self._sampler, progress.order)
            restore_random_state(self._sampler, progress.order)
            with global_generator(progress.order.get("global")):
                order = progress.order or random_state(self._sampler)
                if "sampler" in order and (progress.order or progress.before):
                    drawn = _put_back(self._sampler, order, progress.batches)
                else:
                    drawn = _behind(self._sampler, progress.batches)
                self._drawn = progress.remaining.of(drawn)
                progress.order = order
                first = next(self._drawn)  # most samplers draw the whole order here
                if "sampler" in order and "first" not in order:
                    progress.order = {**order, "first": _plain(first)}
                return first
        return next(self._drawn)


@dataclass
class IndicesAnew:
    """:class:`Indices`, each time that it is iterated."""

    sampler: Any
    progress: BatchProgress

    def __iter__(self) -> Indices:
        return Indices(self.sampler, self.progress)

    def __len__(self) -> int:
        return len(self.sampler)


def _behind(sampler: Any, batches: int) -> Iterator[Any]:
    """What a sampler gives behind some batches."""
    if not batches:
        return iter(sampler)
    if type(sampler) is BatchSampler:
        inner = _Behind(sampler.sampler, batches * sampler.batch_size)
        return iter(BatchSampler(inner, sampler.batch_size, sampler.drop_last))
    return iter(_Behind(sampler, batches))


def _put_back(sampler: Any, order: dict[str, Any], batches: int) -> Iterator[Any]:
    """As :func:`_behind`, of a sampler that was put back to its state at the epoch's start.

    That may say where it stood in the epoch before, as torchdata's samplers do: then it continues there, and what it
    gives when it is iterated again is the order. ``order["first"]`` says with what that begins.

    Raises:
        StateError: it begins with something else.
    """
    generators = {name: order[name] for name in ("generator",) if name in order}
    for _ in range(2):
        drawn = iter(sampler)
        first = list(islice(drawn, 1))
        plain = _plain(first[0]) if first else None
        expected = order.get("first")
        if first and expected in (plain, None):
            order["first"] = plain
            return islice(chain(first, drawn), batches, None)
        restore_random_state(sampler, generators)
    if expected is not None:
        while not keeps_state(sampler):  # a BatchSampler's
            sampler = within(sampler)
        raise StateError(
            f"the sampler of this pg.DataLoader, a {type(sampler).__qualname__}, begins with {plain} where the state "
            f"has {expected}: its load_state_dict must put it to where it draws the same indices again"
        )
    return iter(())


def _plain(value: Any) -> Any:
    """Indices as JSON gives them back; None where they are anything else than numbers, texts and lists of these."""
    if isinstance(value, list | tuple):
        found = [_plain(each) for each in value]
        return None if None in found else found
    return int(value) if isinstance(value, Integral) else value if isinstance(value, str) else None


class _Behind:
    """A sampler without its first indices."""

    def __init__(self, sampler: Iterable[Any], count: int) -> None:
        self._sampler = sampler
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        if type(self._sampler) is SequentialSampler:
            return iter(range(self._count, len(self._sampler)))
        return islice(iter(self._sampler), self._count, None)


def keeps_state(thing: Any) -> bool:
    """Whether it says where it stands, and can be put there. A network's ``state_dict`` is another matter."""
    methods = getattr(thing, "state_dict", None), getattr(thing, "load_state_dict", None)
    return all(map(callable, methods)) and not isinstance(thing, torch.nn.Module)


def within(sampler: Any) -> Any:
    """The sampler that this one takes its indices from; Accelerate's take batches of them."""
    return getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)


def random_state(sampler: Any) -> dict[str, Any]:
    """What a sampler would draw its order from now: its generator, its own state, or the global generator."""
    found: dict[str, Any] = {}
    epoch: dict[str, int] = {}
    plain = False
    while sampler is not None:
        if keeps_state(sampler):
            found["sampler"] = copy.deepcopy(sampler.state_dict())
        if isinstance(getattr(sampler, "generator", None), torch.Generator):
            found["generator"] = text_of(sampler.generator.get_state())
        if _has_epoch(sampler):
            epoch = {"epoch": sampler.epoch}
        plain = type(sampler) in (SequentialSampler, DistributedSampler, list, tuple, range)
        sampler = within(sampler)
    if not found and not plain:
        found = {"global": text_of(torch.get_rng_state())}
    return found | epoch or {"none": ""}


def replicas_of(sampler: Any) -> int | None:
    """Among how many ranks a sampler splits the samples; None if it does not say."""
    while sampler is not None:
        for name in ("num_replicas", "num_processes"):  # Accelerate's is the latter
            if type(found := getattr(sampler, name, None)) is int:
                return found
        sampler = within(sampler)
    return None


def _has_epoch(sampler: Any) -> bool:
    return callable(getattr(sampler, "set_epoch", None)) and type(getattr(sampler, "epoch", None)) is int


def restore_epoch(sampler: Any, order: dict[str, Any]) -> None:
    """Set a sampler to the epoch that a state is of: a script whose checkpoint says ``epoch + 1`` sets another.

    With that one the sampler would draw another order, of which the batches that are left out are not those that
    were delivered.
    """
    while sampler is not None and "epoch" in order:
        if _has_epoch(sampler) and sampler.epoch != order["epoch"]:
            warnings.warn(
                f"the state of this pg.DataLoader is of the middle of epoch {order['epoch']} and its sampler was set "
                f"to epoch {sampler.epoch}: the rest of epoch {order['epoch']} is delivered. A checkpoint that is "
                "saved within an epoch keeps `epoch`, and not `epoch + 1`",
                stacklevel=2,
            )
            sampler.set_epoch(order["epoch"])
        sampler = within(sampler)


def restore_random_state(sampler: Any, order: dict[str, Any]) -> None:
    """Put a sampler's own generator and state to where they stood."""
    while sampler is not None:
        if "sampler" in order and keeps_state(sampler):
            sampler.load_state_dict(copy.deepcopy(order["sampler"]))
        if "generator" in order and isinstance(getattr(sampler, "generator", None), torch.Generator):
            sampler.generator.set_state(tensor_of(order["generator"]))
        sampler = within(sampler)


@contextlib.contextmanager
def global_generator(text: str | None) -> Iterator[None]:
    """For so long torch's global generator stands where it stood then.

    Behind it, it has moved on by one number, as if that had been drawn from it: in a script that seeds itself at its
    start the next epoch would have the same order otherwise.
    """
    if text is None:
        yield
        return
    now = torch.get_rng_state()
    torch.set_rng_state(tensor_of(text))
    try:
        yield
    finally:
        torch.set_rng_state(now)
        torch.empty((), dtype=torch.int64).random_()


def text_of(state: torch.Tensor) -> str:
    """The state of a generator as text."""
    return base64.b64encode(state.numpy().tobytes()).decode()


def tensor_of(text: str) -> torch.Tensor:
    """The inverse of :func:`text_of`."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
