"""Seeds NumPy's and Python's global generators for a sample when they are first drawn from, and not before.

To seed both takes longer than many a sample's own work. So until the first draw something waits in the generators'
place, which seeds the real one, steps aside and passes the call on: the numbers are those of a generator that was
seeded at the sample's begin. Only for a process in which one worker draws, and nothing else.

* NumPy's functions call a bit generator through four C functions, which may be replaced (``set_bit_generator``).
* Those of Python's functions that touch the C state are replaced in their module, and in the instance whose methods
  they are. Where someone holds one of the originals, which cannot be replaced, Python's generator is seeded at once.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from ctypes import CFUNCTYPE, Structure, c_double, c_uint32, c_uint64, c_void_p, cast
from functools import partial
from typing import Any

import numpy as np
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from pipegraph import concurrency, forks

_INTEGER, _SHORT, _DOUBLE = (CFUNCTYPE(kind, c_void_p) for kind in (c_uint64, c_uint32, c_double))

_CALLS: dict[str, Any] = {
    "next_uint64": _INTEGER,
    "next_uint32": _SHORT,
    "next_double": _DOUBLE,
    "next_raw": _INTEGER,
}


class _BitGenerator(Structure):
    """NumPy's ``bitgen_t``, as its manual gives it (Extending)."""

    _fields_ = [("state", c_void_p), *_CALLS.items()]


class _WaitingNumPy(np.random.MT19937):
    """Stands for NumPy's global bit generator until the first draw."""

    def __init__(self, real: np.random.MT19937, seed: Callable[[], int]) -> None:
        super().__init__(0)
        self._real = real
        self._seed = seed
        self._lock = (
            concurrency.RLock()
        )  # a function may draw in threads of its own: one seeds, the others wait
        self.armed = False
        calls = _BitGenerator.from_address(_address(self))
        originals = _BitGenerator.from_address(_address(real))
        for name, kind in _CALLS.items():
            original = cast(getattr(originals, name), kind)
            setattr(calls, name, kind(partial(self._called, original, originals.state)))
        self._calls = calls  # keeps the functions alive

    def arm(self) -> None:
        """The next draw is the first."""
        with self._lock:
            set_bit_generator(self)
            self.armed = True

    def stand_aside(self) -> np.random.MT19937:
        """Give the real one its place back, as it is."""
        with self._lock:
            if self.armed:
                set_bit_generator(self._real)
                self.armed = False
        return self._real

    def first(self) -> np.random.MT19937:
        """The real one, seeded."""
        with self._lock:
            if self.armed:
                self._real._legacy_seeding(self._seed() & 0xFFFFFFFF)
            return self.stand_aside()

    def _called(self, original: Callable[[int], Any], state: int, _: int) -> Any:
        self.first()
        return original(state)

    def _legacy_seeding(self, seed: Any) -> None:
        self.stand_aside()._legacy_seeding(seed)

    def in_child(self) -> None:
        """In a forked child."""
        self._lock = concurrency.RLock()

    @property
    def state(self) -> Any:
        return self.first().state

    @state.setter
    def state(self, state: Any) -> None:
        self.stand_aside()
        np.random.set_state(state)  # again: what it has set beside our state went with the exchange

    def __reduce__(self) -> Any:
        return self.first().__reduce__()


def _address(generator: np.random.MT19937) -> int:
    return int(generator.ctypes.bit_generator.value)


class _WaitingPython:
    """Stands for Python's global generator until the first draw."""

    def __init__(self, seed: Callable[[], int]) -> None:
        self._seed = seed
        self._lock = concurrency.RLock()  # as above
        self.armed = False
        self._module = vars(random)
        names = ("random", "getrandbits", "seed", "getstate", "setstate")
        self._originals = {name: self._module[name] for name in names}
        self._waiting = {name: partial(self._called, name) for name in names}
        self._instance: dict[str, Any] = random.random.__self__.__dict__  # type: ignore[attr-defined]
        both = {"held by two": object()}
        self._table = dict(both)
        self._fewest = sys.getrefcount(both["held by two"])

    def arm(self) -> None:
        """The next draw is the first."""
        if any(sys.getrefcount(self._originals[name]) != self._fewest for name in self._originals):
            self._originals["seed"](self._seed() >> 64)
            return
        with self._lock:
            self._instance.update(self._waiting, gauss_next=None)
            self._module.update(self._waiting)
            self.armed = True

    def in_child(self) -> None:
        """In a forked child the generator is seeded by the system, as everywhere."""
        self._lock = concurrency.RLock()
        if self.armed:
            self._called("seed")

    def _called(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self.armed:
                if name not in ("seed", "setstate"):
                    self._originals["seed"](self._seed() >> 64)
                self._module.update(self._originals)
                for each in self._originals:
                    del self._instance[each]
                self.armed = False
        return self._originals[name](*args, **kwargs)


class FirstDraw:
    """Both generators of this process.

    Args:
        seed: gives the current sample's, 128 bits.
    """

    def __init__(self, seed: Callable[[], int]) -> None:
        real = get_bit_generator()
        if not isinstance(
            real, np.random.MT19937
        ):  # the user's, which nothing seeds: NumPy's functions get their own
            real = np.random.MT19937()
        self._numpy = _WaitingNumPy(real, seed)
        self._python = _WaitingPython(seed)
        forks.in_child(self._numpy.in_child)
        forks.in_child(self._python.in_child)

    def begin(self) -> None:
        """Another sample: the next draw of each generator is its first."""
        if not self._numpy.armed:
            self._numpy.arm()
        if not self._python.armed:
            self._python.arm()
