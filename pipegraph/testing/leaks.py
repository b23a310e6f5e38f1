"""Detects leaked threads, processes, file descriptors and shared memory. Needs pytest, which is no dependency."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipegraph.engine.process import zygote

_SHARED_MEMORY = "/dev/shm/"


def _descriptors(pid: int) -> frozenset[str]:
    found = set()
    with contextlib.suppress(OSError):  # there is no /proc, or it has ended
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # the one that listed the folder
                found.add(f"{number} -> {os.readlink(f'/proc/{pid}/fd/{number}')}")
    return frozenset(found)


def _children_of(pid: int) -> frozenset[int]:
    children: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                children.update(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return frozenset(children)


def _children() -> frozenset[int]:
    """Numbers of this process's children; without /proc only of those that ``multiprocessing`` started."""
    ours = frozenset(child.pid or 0 for child in multiprocessing.active_children())  # reaps those that ended
    return ours | _children_of(os.getpid())


def _shared_memory() -> frozenset[str]:
    """Names under ``/dev/shm`` that this process or a descendant maps or holds open.

    The folder is the machine's: what other programs make there, or leave there when they are killed, is not ours.
    """
    names, family = set(), [os.getpid()]
    for pid in family:
        family += _children_of(pid)
        used = list(_descriptors(pid))
        with contextlib.suppress(OSError):
            used += Path(f"/proc/{pid}/maps").read_text().splitlines()
        for line in used:
            _, found, name = line.partition(_SHARED_MEMORY)
            if found and not name.endswith(" (deleted)"):
                names.add(name)
    return frozenset(names)


@dataclass(frozen=True)
class Resources:
    """What this process holds, apart from the process that starts the workers of all its loaders.

    Attributes:
        threads: live threads, by name and identity.
        processes: live child processes.
        descriptors: open file descriptors and what they are.
        shared_memory: names under ``/dev/shm`` that it or a descendant maps or holds open.
    """

    threads: frozenset[tuple[str, int]]
    processes: frozenset[int]
    descriptors: frozenset[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Resources:
        """One look."""
        lasting = zygote.lasting()
        kept = () if lasting is None else lasting.descriptors
        return cls(
            frozenset((t.name, t.ident or 0) for t in threading.enumerate()),
            _children() - (set() if lasting is None else {lasting.pid}),
            frozenset(each for each in _descriptors(os.getpid()) if int(each.split()[0]) not in kept),
            _shared_memory(),
        )

    def leaked_since(self, before: Resources) -> list[str]:
        """What is there now and was not before, in words."""
        found = [f"thread {name}" for name, _ in sorted(self.threads - before.threads)]
        found += [f"process {pid}" for pid in sorted(self.processes - before.processes)]
        found += [f"descriptor {each}" for each in sorted(self.descriptors - before.descriptors)]
        found += [f"shared memory {each}" for each in sorted(self.shared_memory - before.shared_memory)]
        return found


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves threads, processes, descriptors or shared memory behind."""
    before = Resources.now()
    yield
    leaked = Resources.now().leaked_since(before)
    if leaked:  # perhaps only garbage that nobody has collected yet
        gc.collect()
        leaked = Resources.now().leaked_since(before)
    assert not leaked, "the test left behind: " + "; ".join(leaked)
