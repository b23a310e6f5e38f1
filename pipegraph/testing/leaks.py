"""Detects leaked threads, processes, file descriptors and shared memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

_DESCRIPTORS = Path("/proc/self/fd")
_SHARED_MEMORY = Path("/dev/shm")


def _descriptors() -> frozenset[str]:
    if not _DESCRIPTORS.is_dir():
        return frozenset()
    found = set()
    for number in os.listdir(_DESCRIPTORS):
        try:
            found.add(f"{number} -> {os.readlink(_DESCRIPTORS / number)}")
        except OSError:
            continue  # the one that listed the folder
    return frozenset(found)


def _children() -> frozenset[int]:
    """Numbers of this process's children; without /proc only of those that ``multiprocessing`` started."""
    children = frozenset(
        child.pid or 0 for child in multiprocessing.active_children()
    )  # reaps those that ended
    try:
        for thread in os.listdir("/proc/self/task"):
            listed = Path(f"/proc/self/task/{thread}/children").read_text().split()
            children |= frozenset(map(int, listed))
    except OSError:
        pass
    return children


def _used_by_others() -> frozenset[str]:
    """Shared memory that processes map or hold open which do not descend from this one."""
    family = {os.getpid()}
    parents = {}
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit():
                stat = Path(f"/proc/{entry}/stat").read_text()
                parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    names = set()
    for pid in parents.keys() - family:
        try:
            used = Path(f"/proc/{pid}/maps").read_text().splitlines()
            used += [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        for line in used:
            _, found, name = line.partition(f"{_SHARED_MEMORY}/")
            if found:
                names.add(name.removesuffix(" (deleted)"))
    return frozenset(names)


@dataclass(frozen=True)
class Resources:
    """What this process holds.

    Attributes:
        threads: live threads, by name and identity.
        processes: live child processes.
        descriptors: open file descriptors and what they are.
        shared_memory: names under ``/dev/shm``.
    """

    threads: frozenset[tuple[str, int]]
    processes: frozenset[int]
    descriptors: frozenset[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Resources:
        """One look."""
        return cls(
            frozenset((t.name, t.ident or 0) for t in threading.enumerate()),
            _children(),
            _descriptors(),
            frozenset(os.listdir(_SHARED_MEMORY)) if _SHARED_MEMORY.is_dir() else frozenset(),
        )

    def leaked_since(self, before: Resources) -> list[str]:
        """What is there now and was not before, in words."""
        found = [f"thread {name}" for name, _ in sorted(self.threads - before.threads)]
        found += [f"process {pid}" for pid in sorted(self.processes - before.processes)]
        found += [f"descriptor {each}" for each in sorted(self.descriptors - before.descriptors)]
        more = self.shared_memory - before.shared_memory
        if more:  # the folder is the machine's: other programs make theirs at the same time
            more &= frozenset(os.listdir(_SHARED_MEMORY)) - _used_by_others()
        found += [f"shared memory {each}" for each in sorted(more)]
        return found


def _no_leaks() -> Iterator[None]:
    """Fails a test that leaves threads, processes, descriptors or shared memory behind."""
    before = Resources.now()
    yield
    leaked = Resources.now().leaked_since(before)
    if leaked:  # perhaps only garbage that nobody has collected yet
        gc.collect()
        leaked = Resources.now().leaked_since(before)
    assert not leaked, "the test left behind: " + "; ".join(leaked)


if TYPE_CHECKING:
    no_leaks: Any


def __getattr__(name: str) -> Any:
    # A pytest fixture, made at first use: pytest is no dependency of the package.
    if name != "no_leaks":
        raise AttributeError(name)
    import pytest

    fixture = pytest.fixture(name="no_leaks")(_no_leaks)
    globals()[name] = fixture
    return fixture
