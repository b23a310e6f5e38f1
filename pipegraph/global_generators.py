"""Seeds the global generators of torch, NumPy and Python for user code that draws from them.

All threads of a process share these generators, the training loop's included. So:

* In the pipeline's threads torch's random functions get a generator of the current sample, keyed as
  :mod:`pipegraph.randomness` keys the ``rng`` of a function. This uses a dispatch key that torch reserves for
  out-of-tree code, included in these threads only. It has kernels for the operators that take a generator, and falls
  through for all others: code that does not draw pays nothing, and the training thread is not affected.
* In a worker's process, where nothing else draws, NumPy's and Python's generators are keyed alike (``first_draw``).
  In threads that is impossible; :func:`draws_from` finds the functions that use them, so that the plan can warn.

A generator is seeded at a sample's first draw. Torch's functions of seeds and states (``torch.manual_seed``,
``torch.random.fork_rng``) mean the current sample's generator too, in these threads only; those of a device's module do
not.
"""

from __future__ import annotations

import dis
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import chain, islice
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from pipegraph import concurrency
from pipegraph.chunk import Chunk
from pipegraph.hashed_keys import key

if TYPE_CHECKING:
    from pipegraph.first_draw import FirstDraw

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
_others: FirstDraw | None = None
_drawing: Draws  # the last that was begun in this process, if there are _others


class DrawnForSeveral(Exception):
    """Random numbers were drawn in a call for several samples: read them one by one, so that each draws its own."""


class Draws:
    """The generators of one operator copy, keyed by the current sample. Made in ``open``; used by one worker."""

    __slots__ = (
        "_at", "_begun", "_epoch", "_first", "_generators", "_given", "_lineages", "_made", "_row", "_seed",
        "_stage", "drew", "drew_for_several",
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
        self._at = 0  # the row whose numbers NumPy's and Python's generators give
        self.drew_for_several = False  # from one of these two

    def one(self, epoch: int, lineage: Any) -> None:
        """Make this the current sample of the calling thread (or task)."""
        self._epoch = epoch
        self._lineages = (lineage,)
        self._made = None
        self._row, self._given, self.drew = -1, None, False
        _current.set(self)
        if _others is not None:
            self._begin_others(0)

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
        return rest if _others is None else self._beginning_others(rest, start)

    def _beginning_others(self, items: Iterable[T], start: int) -> Iterator[T]:
        for row, item in enumerate(items, start):
            self._begin_others(row)
            yield item

    def several(self) -> None:
        """Work on several samples in one call: a draw in it raises :class:`DrawnForSeveral`, or is noted in
        ``drew_for_several``."""
        self._lineages = ()
        self._made = None
        self._row, self._given, self.drew = -1, None, False
        self.drew_for_several = False
        _current.set(self)
        if _others is not None:
            self._begin_others(0)

    def over(self) -> None:
        """The rows are done: drop the references to them."""
        self._made, self._lineages = None, ((),)

    def _begin_others(self, row: int) -> None:
        """NumPy's and Python's global generators give a row's numbers now. Only in a worker's own process."""
        global _drawing
        assert _others is not None
        self._at = row
        _drawing = self
        _others.begin()

    def seed_of_others(self) -> int:
        """The seed of NumPy's and Python's global generators."""
        self.drew_for_several = not self._lineages
        lineage = None if self.drew_for_several else self._lineages[self._at]
        return key(self._seed, self._epoch, lineage, self._stage, "process")

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
    global _others
    if _others is None:
        from pipegraph.first_draw import FirstDraw  # NumPy's generators: the trainer does without

        _others = FirstDraw(lambda: _drawing.seed_of_others())


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


# -- finding uses of the generators that cannot be replaced in threads -------------------------

DEPTH = 3
"""How many levels of called functions are searched."""


def draws_from(functions: Iterable[Any]) -> list[str]:
    """Which of ``numpy.random`` and ``random`` the code of some functions, or of functions that they call, refers to.

    Indirect uses (a method of an object, a function passed as an argument) are not found.
    """
    found: set[str] = set()
    for function in functions:
        _look(function, found, set(), DEPTH)
    return sorted(found)


def _look(function: Any, found: set[str], seen: set[int], depth: int) -> None:
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    if not hasattr(function, "__code__"):
        function = getattr(type(function), "__call__", None)  # noqa: B004
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or id(code) in seen or depth == 0:
        return
    seen.add(id(code))
    closed: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell
            closed[name] = cell.cell_contents
    value = None
    for step, name in _loads(code):
        if step == "LOAD_ATTR":
            if value is np and name == "random":  # which NumPy imports at its first use
                value = np.random
            else:
                value = vars(value).get(name) if isinstance(value, ModuleType) else None
        else:
            value = closed.get(name, function.__globals__.get(name))
        # Ask only methods for their owner: other objects may define any attribute, or load a library to do so.
        owner = value.__self__ if isinstance(value, MethodType | BuiltinMethodType) else None
        if owner is not None and owner is _numpys_own():
            found.add("numpy.random")
        elif owner is _PYTHON:
            found.add("random")
        elif inspect.isfunction(value) and value.__module__ not in sys.stdlib_module_names:
            _look(value, found, seen, depth - 1)


_PYTHON = getattr(random.random, "__self__", None)


def _numpys_own() -> Any:
    """NumPy's global generator; None where nobody can have it yet: its module has not been imported."""
    module = sys.modules.get("numpy.random")
    return None if module is None else module.rand.__self__


@lru_cache(maxsize=512)
def _loads(code: CodeType) -> tuple[tuple[str, str], ...]:
    """The names that the code loads, and the attributes that it asks of what it has just loaded.

    Kept: to disassemble a function takes 0.2 ms.
    """
    found: list[tuple[str, str]] = []
    follows = False
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            found.append(("LOAD_NAME", step.argval))
            follows = True
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and follows:
            found.append(("LOAD_ATTR", step.argval))
        elif step.opname not in ("CACHE", "PUSH_NULL"):
            follows = False
    inner = (_loads(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return (*found, *chain.from_iterable(inner))
