"""Seeds the global generators of torch, NumPy and Python for user code that draws from them.

All threads of a process share these generators, the training loop's included. So:

* In the pipeline's threads torch's random functions get a generator of the current sample, keyed as
  :mod:`pipegraph.randomness` keys the ``rng`` of a function. This uses a dispatch key that torch reserves for
  out-of-tree code, included in these threads only. It has kernels for the operators that take a generator, and falls
  through for all others: code that does not draw pays nothing, and the training thread is not affected.
* In a worker's process, where nothing else draws, NumPy's and Python's generators are seeded alike for each sample. In
  threads that is impossible. Seeding takes longer than many a function; so once ``UNDRAWN`` rows in a row have drawn
  nothing, only the first row of a bundle is seeded, the states are watched, and a row that draws after all is done
  again with its own seed: the worker ends the call before it, and the trainer calls again from there.

Torch's generators are seeded at a sample's first draw. Torch's functions of seeds and states (``torch.manual_seed``,
``torch.random.fork_rng``) mean the current sample's generator too, in these threads only; those of a device's module do
not.
"""

from __future__ import annotations

import _random
import ctypes
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import islice
from types import FunctionType
from typing import Any, TypeVar

import numpy as np
import torch

from pipegraph import concurrency
from pipegraph.chunk import Chunk
from pipegraph.randomness import key

T = TypeVar("T")

KEY = "TESTING_ONLY_GenericMode"
"""Torch's dispatch key for modes of out-of-tree code; torch registers no kernel of its own for it."""

_NAMES = """
    _fused_dropout _no_grad_normal_ _no_grad_uniform_ _sample_dirichlet _standard_gamma bernoulli bernoulli_ binomial
    cauchy cauchy_ exponential exponential_ geometric geometric_ log_normal log_normal_ multinomial normal normal_
    normal_functional poisson rand rand_like randint randint_like randn randn_like random random_ randperm rrelu rrelu_
    rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_functional uniform uniform_
"""
DRAWING = tuple(_NAMES.split())
"""Torch's operators that take a generator; those that a version lacks are ignored. Listed here because reading torch's
own list takes 0.1 s; a test compares the two."""

_CPU = torch.device("cpu")
_current: ContextVar[Draws | None] = ContextVar("draws", default=None)
_installing = concurrency.Lock()
_libraries: list[torch.library.Library] = []
_key: Any = torch._C._parse_dispatch_key(KEY)
_keys: Any = torch._C.DispatchKeySet(_key)
_include = torch._C._dispatch_tls_set_dispatch_key_included
_numpys: Any = None  # NumPy's global generator, in a worker's own process
_PYTHONS: Any = random.seed.__self__  # type: ignore[attr-defined]  # Python's global generator
_states: tuple[Any, Any, Any] | None = (
    None  # of both as 32-bit words, and NumPy's bit generator, which owns its own
)
_watched: tuple[Draws, Any] | None = None  # whose rows are not seeded, and the marks before them

UNDRAWN = 1000
"""Rows without a draw after which rows are watched: a function that draws for one row in a hundred is seeded always."""


class DrawnForSeveral(Exception):
    """Random numbers were drawn in a call for several samples: read them one by one, so that each draws its own."""


class DrewUnseededError(Exception):
    """A row that was not seeded has drawn, and must be done again."""


class Draws:
    """The generators of one operator copy, keyed by the current sample. Made in ``open``; used by one worker."""

    __slots__ = (
        "_begun", "_epoch", "_first", "_generators", "_given", "_lineages", "_made", "_marks", "_row", "_seed",
        "_stage", "_undrawn", "drew",
    )  # fmt: skip

    def __init__(self, seed: int = 0, stage: str = "") -> None:
        self._seed = seed
        self._stage = stage
        self._epoch = 0
        self._lineages: Sequence[Any] = ((),)
        self._made: list[Any] | None = None
        self._first, self._row = 0, -1  # the row of the bundle that drew last; -1: none so far
        self._generators: dict[torch.device, torch.Generator] = {}
        self._begun: set[torch.device] = set()
        self._given: int | None = None  # the seed that the user's code has set for the rest of the sample
        self.drew = False  # numbers that no seed of the user's gave
        self._marks: Any = None
        self._undrawn = 0  # rows since the last that drew from NumPy's or Python's generator

    def one(self, epoch: int, lineage: Any) -> None:
        """Make this the current sample of the calling thread (or task)."""
        self._epoch = epoch
        self._lineages = (lineage,)
        self._made = None
        self._row, self._given, self.drew = -1, None, False
        _current.set(self)
        if _numpys is not None:
            self._seed_others(lineage)

    def rows(
        self, epoch: int, lineages: Sequence[Any], made: list[Any], start: int, items: Iterable[T]
    ) -> Iterable[T]:
        """Work on one row after the other, from ``start``: the length of ``made``, to which the caller appends the
        results, tells which row is current.

        Returns the ``items`` of these rows.
        """
        self._epoch = epoch
        self._lineages = lineages
        self._made = made
        self._first = start - len(made)
        self._row, self._given, self.drew = -1, None, False
        _current.set(self)
        rest = islice(items, start, None) if start else items
        return rest if _numpys is None else self._seeding_others(rest, start)

    def _seeding_others(self, items: Iterable[T], start: int) -> Iterator[T]:
        global _watched
        _watched = None
        for row, item in enumerate(items, start):
            if _watched is None:
                self._seed_others(self._lineages[row])
                marks = _marks()
                yield item
                self._undrawn = self._undrawn + 1 if _marks() == marks else 0
                if self._undrawn >= UNDRAWN:
                    _watched = self, marks
            else:
                yield item
                if _marks() != marks:
                    assert self._made is not None
                    del self._made[row - self._first :]
                    raise DrewUnseededError
        _watched = None

    def several(self) -> None:
        """Work on several samples in one call: a draw in it raises :class:`DrawnForSeveral`, or is found by
        :meth:`drew_for_several`."""
        self._lineages = ()
        self._made = None
        self._row, self._given, self.drew = -1, None, False
        _current.set(self)
        if _numpys is not None:
            self._seed_others(None)
            self._marks = _marks()

    def drew_for_several(self) -> bool:
        """Whether the call drew from NumPy's or Python's generator."""
        return _numpys is not None and _marks() != self._marks

    def over(self) -> None:
        """The rows are done: drop the references to them."""
        self._made, self._lineages = None, ((),)

    def _seed_others(self, lineage: Any) -> None:
        """NumPy's and Python's global generators give this sample's numbers now. Only in a worker's own process."""
        seed = key(self._seed, self._epoch, lineage, self._stage, "process")
        _random.Random.seed(_PYTHONS, seed >> 64 & 0xFFFFFFFF)  # half the time of random.seed
        _PYTHONS.gauss_next = None
        if isinstance(_numpys._bit_generator, np.random.MT19937):  # else the user's, which nothing seeds
            _numpys.seed(seed & 0xFFFFFFFF)

    def again(self) -> None:
        """Resume the current sample, after other operators have worked in this thread."""
        _current.set(self)

    def each(self, items: Iterator[Any], epoch: int, above: Sequence[Any], number: int = 0) -> Iterator[Any]:
        """Yield the items; item i is made with the generator of lineage ``(*above, number + i)``, or with the seed that
        the user's code has set for the rest of them.
        """
        self.one(epoch, (*above, number))
        while True:
            try:
                item = next(items)
            except StopIteration:
                return
            yield item
            number += 1
            if self._given is None:
                self.one(epoch, (*above, number))
            else:
                self.again()

    def lazily(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield the items, all made with the current sample's generator."""
        while True:
            self.again()
            try:
                item = next(items)
            except StopIteration:
                return
            yield item

    def end(self) -> None:
        """Work on what the operator still holds at the end of the epoch."""
        self.one(self._epoch, ("end",))

    def generator(self, device: torch.device) -> torch.Generator:
        """Torch's generator for the current sample."""
        row = 0 if self._made is None else self._first + len(self._made)
        if row != self._row:
            self._row = row
            self._begun.clear()
            self._given = None
        found = self._generators.get(device)
        if found is None:
            found = self._generators[device] = torch.Generator(device)
        if device not in self._begun:
            self._begun.add(device)
            if not self._lineages:
                raise DrawnForSeveral
            if self._given is None:
                lineage = self._lineages[row]
                seed = key(self._seed, self._epoch, lineage, self._stage, "torch") & ((1 << 63) - 1)
            else:
                seed = self._given
            found.manual_seed(seed)
        return found

    def seed(self, seed: int) -> torch.Generator:
        """The rest of the current sample draws with this seed; returns the CPU's generator, as torch does."""
        found = self.generator(_CPU).manual_seed(seed)
        self._begun, self._given = {_CPU}, seed
        return found


def drew() -> Draws | None:
    """The thread's current ``Draws``, if its current sample has drawn from torch's generators, without a seed of the
    user's; else None."""
    draws = _current.get()
    return draws if draws is not None and draws.drew else None


def drawing(call: Callable[[Chunk], Any], draws: Draws) -> Callable[[Chunk], Any]:
    """Wrap ``call`` so that user code in it draws from the generator of the chunk's first sample."""

    def with_numbers(chunk: Chunk) -> Any:
        draws.one(chunk.epoch, chunk.lineages[0])
        made = call(chunk)
        if made.__class__ is Chunk or not isinstance(made, Iterator):
            return made
        return draws.lazily(iter(made))

    return with_numbers


def included() -> Any:
    """A context in which torch's random functions in this thread draw from the current sample's generator.

    Entered and left in C: Ctrl-C between the two cannot leave the training loop's thread inside.
    """
    if not _libraries:
        install()
    return torch._C._IncludeDispatchKeyGuard(_key)


def leave() -> None:
    """The thread draws from torch's global generator again."""
    _include(_key, False)


def enter_worker(seed: int, stage: str) -> None:
    """As :func:`included`, for a worker thread's whole life; draws outside of items use the stage's generator."""
    included()
    _include(_key, True)
    _current.set(Draws(seed, stage))


def own_process() -> None:
    """Declare this process a worker's: NumPy's and Python's generators then give each sample's own numbers."""
    global _numpys, _states
    _numpys = np.random.rand.__self__  # type: ignore[attr-defined]
    bits, words = _numpys._bit_generator, ctypes.c_uint32 * 625
    python = words.from_address(id(_PYTHONS) + object.__basicsize__)  # its place, and 624 words
    if isinstance(bits, np.random.MT19937) and [*python[1:], python[0]] == list(random.getstate()[1]):
        numpy = words.from_address(bits.ctypes.state_address)  # 624 words, and its place
        _states = memoryview(python).cast("B").cast("I"), memoryview(numpy).cast("B").cast("I"), bits


def _marks() -> Any:
    """What is another once somebody has drawn from NumPy's or Python's generator, or has seeded it."""
    if _states is None or _numpys._bit_generator is not _states[2]:
        return random.getstate(), repr(_numpys.get_state(legacy=False))
    python, numpy, _ = _states
    return python[0], python[1], numpy[624], numpy[0]


def drew_unseeded() -> bool:
    """Whether the call that has just failed drew in a row that was not seeded: the row is to be done again."""
    global _watched
    watched, _watched = _watched, None
    if watched is None or _marks() == watched[1]:
        return False
    watched[0]._undrawn = 0
    return True


def install() -> None:
    """Register the kernels; takes a few milliseconds, once per process. A forked child inherits them."""
    with _installing:
        if _libraries:
            return
        library: Any = torch.library.Library
        rest = library("_", "IMPL", KEY)
        rest.fallback(torch.library.fallthrough_kernel, KEY)
        drawing = library("aten", "IMPL", KEY)
        for name in DRAWING:
            if not hasattr(torch.ops.aten, name):
                continue
            for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
                places = [i for i, each in enumerate(schema.arguments) if each.name == "generator"]
                overload = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default", None)
                if places and overload is not None:
                    at = -1 if schema.arguments[places[0]].kwarg_only else places[0]
                    drawing.impl(overload, partial(_draw, overload, at), KEY)
        _ThreadsGenerator()
        _libraries.extend((rest, drawing))


class _ThreadsGenerator:
    """What torch's functions of seeds and states have in place of its default generator: in a pipeline's thread they
    mean the current sample's generator. They are no operators, so no kernel sees them.
    """

    NAME = "pipegraph_generator"

    def __init__(self) -> None:
        module = vars(torch.random)
        self._process = module["default_generator"]
        # Others hold these functions and this generator, so neither is replaced: the functions read another name.
        module[self.NAME] = self
        for each in list(module.values()):
            names = each.__code__.co_names if isinstance(each, FunctionType) else ()
            if "default_generator" in names and each.__module__ == torch.random.__name__:
                own = tuple(self.NAME if name == "default_generator" else name for name in names)
                each.__code__ = each.__code__.replace(co_names=own)
        self._seed_all = module.get("_manual_seed_impl")
        if self._seed_all is not None:  # else torch.manual_seed seeds devices for the whole process
            module["_manual_seed_impl"] = self.seed_all

    def __getattr__(self, name: str) -> Any:
        draws = _of_thread()
        return getattr(self._process if draws is None else draws.generator(_CPU), name)

    def seed_all(self, seed: Any) -> torch.Generator:
        """``torch.manual_seed``, which also seeds the generators of all devices."""
        draws = _of_thread()
        assert self._seed_all is not None
        found: torch.Generator = self._seed_all(seed) if draws is None else draws.seed(int(seed))
        return found


def _of_thread() -> Draws | None:
    """The current sample's, in a thread whose draws are the pipeline's."""
    return _current.get() if torch._C._dispatch_tls_is_dispatch_key_included(_key) else None


def _draw(operator: Any, at: int, *args: Any, **kwargs: Any) -> Any:
    """The kernel for draws in a pipeline's thread; ``at`` is the generator's place in ``args``, -1: it is a keyword."""
    draws = _current.get()
    given = kwargs.get("generator") if at < 0 or len(args) <= at else args[at]
    if given is None and draws is not None:
        device = _device_of(args, kwargs)
        if device.type != "meta":
            generator = draws.generator(device)
            draws.drew |= draws._given is None
            if 0 <= at < len(args):
                args = (*args[:at], generator, *args[at + 1 :])
            else:
                kwargs["generator"] = generator
    with torch._C._ExcludeDispatchKeyGuard(_keys):
        return operator(*args, **kwargs)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for each in (*args, kwargs.get("out"), kwargs.get("out0")):
        if isinstance(each, torch.Tensor):
            return each.device
    device = kwargs.get("device")
    return _CPU if device is None else torch.device(device)
