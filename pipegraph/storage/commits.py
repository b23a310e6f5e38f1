"""Writes cache entries to disk: synced and renamed by one thread, while they are read already.

A disk takes milliseconds to sync an entry, or seconds where others write too. Who has downloaded one does not
wait for that: what came was checked, and lies in the kernel's memory. Nobody else sees the entry before its sync.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Final

from pipegraph import concurrency
from pipegraph.errors import LoaderClosedError

from .entries import CachedFile, Fate
from .filelock import LOCK_SH, flock, is_at
from .manifest import sync_folder

MAX_PENDING: Final = 8
"""Entries being written at most: with more, the disk is slower than the network and limits the speed anyway."""


class _Commit:
    def __init__(self, uri: str, fd: int, partial: str, final_path: str) -> None:
        self.uri, self.fd = uri, fd
        self.partial, self.final_path = partial, final_path
        self.fate = Fate()

    def run(self) -> None:
        """Make the entry visible, or remove it. Gives up the exclusive lock."""
        try:
            os.fsync(self.fd)
            os.rename(self.partial, self.final_path)
            sync_folder(os.path.dirname(self.final_path))
        except OSError as error:
            self.fate.error = error
            if is_at(self.fd, self.partial):
                os.unlink(self.partial)
        # Readers of this process hold duplicates, and with them this lock, until they are closed.
        # Becoming shared is not atomic: an eviction may come between; readers keep the file all the same.
        flock(self.fd, LOCK_SH)


class Commits:
    """One cache's entries that are not on disk yet. Thread-safe.

    The thread lives as long as there is something to do, so that a cache nobody closes leaves none behind.
    """

    def __init__(self) -> None:
        self._changed = concurrency.Condition()
        self._queue: deque[str] = deque()
        self._pending: dict[str, _Commit] = {}
        self._thread: concurrency.Thread | None = None
        self._runs = self._closed = False

    def add(self, name: str, uri: str, fd: int, partial: str, final_path: str) -> CachedFile:
        """Take over an exclusively locked file with an entry's checked bytes, and give it to be read.

        Waits while `MAX_PENDING` are being written. If it was closed, `fd` stays the caller's.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._pending) < MAX_PENDING)
            self._check_open()
            commit = self._pending[name] = _Commit(uri, fd, partial, final_path)
            file = self._open(commit)
            self._queue.append(name)
            if not self._runs:
                self._runs = True
                self._thread = concurrency.Thread(target=self._run, name="pipegraph-cache-sync", daemon=True)
                self._thread.start()
        return file

    def open(self, name: str) -> CachedFile | None:
        """An entry that is on its way, or None."""
        with self._changed:
            commit = self._pending.get(name)
            return None if commit is None else self._open(commit)

    def names(self) -> frozenset[str]:
        """Of the entries that are on their way."""
        with self._changed:
            return frozenset(self._pending)

    def wait(self, name: str) -> None:
        """Until the entry is not on its way any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or name not in self._pending)
            if name in self._pending:
                self._check_open()

    def flush(self) -> None:
        """Wait until none is on its way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)

    def close(self) -> None:
        """End all waits; what is on its way arrives first. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise LoaderClosedError("the node cache is closed")

    def _open(self, commit: _Commit) -> CachedFile:
        return CachedFile(commit.uri, os.dup(commit.fd), commit.fate)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._runs = False
                    return
                name = self._queue.popleft()
                commit = self._pending[name]
            try:
                commit.run()
            finally:
                with self._changed:
                    del self._pending[name]
                    os.close(commit.fd)  # not sooner: `open` duplicates it
                    self._changed.notify_all()
