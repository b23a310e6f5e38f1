"""The zygote: a process without threads that has imported torch once, and forks worker processes.

A new interpreter takes seconds to import torch; a fork of one that has imported it takes milliseconds. A process with
threads or a device's context must not fork, and a trainer has both: so a *zygote*, which has neither, forks on its
behalf. It is itself a fork of the trainer if that has no Python threads and no context, else a new interpreter. A fork
costs little and has the trainer's modules as they are: it lives while a loader has processes, or while an object keeps
it (:func:`keep_for`) and it is not renewed. An interpreter costs seconds and has none of the user's modules: it lives
as long as the trainer.

No process outlives the trainer: the zygote ends when its socket closes, and the kernel then ends its children
(``PR_SET_PDEATHSIG``), even those that hang.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from pipegraph import concurrency, forks
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.process import surroundings
from pipegraph.engine.process.fork_server import AHEAD, REAP, SPAWN, preload, receive, serve
from pipegraph.importing import importing


@dataclass
class Child:
    """A worker process, as seen by the trainer.

    Attributes:
        pid: its process id.
        sentinel: a descriptor that becomes readable when it ends.
        sock: the trainer's end of its socket.
    """

    pid: int
    sentinel: int
    sock: socket.socket

    def kill(self) -> None:
        """Kill it."""
        self.interrupt(signal.SIGKILL)

    def interrupt(self, signum: int) -> None:
        """Send it a signal, through its sentinel: once it was reaped, its process id may be reused."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, signum)

    def ends_within(self, seconds: float) -> bool:
        """Whether it ends within some seconds; waits for it."""
        return bool(wait([self.sentinel], None if seconds == math.inf else seconds))

    def close(self) -> None:
        """Close our descriptors."""
        self.sock.close()
        sentinel, self.sentinel = self.sentinel, -1  # see Sealed.close
        if sentinel >= 0:
            os.close(sentinel)


class Zygote:
    """The trainer's handle of a zygote. Thread-safe: requests are made one at a time under ``_lock``.

    Args:
        workers: so many will be asked for soon.
    """

    def __init__(self, workers: int) -> None:
        self._lock = concurrency.Lock()
        self.forked = True
        self._begin()
        with contextlib.suppress(*GONE):  # the first request for a worker starts another
            self._sock.send(AHEAD + str(workers).encode())
        forks.notify(self)

    def _begin(self) -> None:
        surroundings.fill_standard_descriptors()
        ours, theirs = surroundings.socket_pair(socket.SOCK_SEQPACKET)
        self._ready, ready = os.pipe()
        try:
            self.forked = self.forked and may_fork()
            self._process: subprocess.Popen[bytes] | None = None
            if self.forked:
                # Here, once: in the fork it would take twice the time, which copies the pages that it writes.
                with importing():
                    preload()
                self.pid = _fork_zygote(theirs, ready)
            else:
                self._process = _start_interpreter(theirs, ready)
                self.pid = self._process.pid
        except BaseException:
            ours.close()
            self._close_ready()
            raise
        finally:
            theirs.close()
            os.close(ready)
        self._sock = ours

    def spawn(self, fds: list[int], cancel: int) -> Child:
        """A worker process, which gets its socket and ``fds``; see ``worker_life``.

        A zygote that was killed is started again; the kernel has ended its children with it.

        Args:
            cancel: a descriptor that becomes readable if the process is no longer wanted.

        Raises:
            EOFError, BrokenPipeError, ConnectionResetError: the zygote was killed, and the next one too.
            OSError: no process could be forked.
            Cancelled: ``cancel`` became readable.
        """
        ours, theirs = surroundings.socket_pair()
        try:
            for last in (False, True):
                sock = self._sock
                self._wait_until_ready(cancel)
                with self._lock, surroundings.taken() as now:
                    try:
                        answer, found = self._ask(SPAWN, [*now, theirs.fileno(), *fds])
                        break
                    except GONE:
                        if last:
                            raise
                        if self._sock is sock:  # otherwise another thread has restarted it
                            self._end()
                            self._begin()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        pid, error = pickle.loads(answer)
        if error is not None:
            ours.close()
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        return Child(pid, found[0], ours)

    def _wait_until_ready(self, cancel: int) -> None:
        """Blocks until the zygote has imported what it needs, which may take seconds, or has ended.

        Outside the lock, so that each caller can be cancelled independently. Afterwards requests take no time.
        """
        with self._lock:
            ready = os.dup(
                self._ready
            )  # another thread may close it: the zygote was killed, and is started again
        try:
            if cancel in wait([ready, cancel]):
                raise Cancelled
        finally:
            os.close(ready)

    def reap(self, child: Child) -> int | None:
        """The exit status of a child that has ended (or is about to), as from ``os.waitstatus_to_exitcode``.

        None if not known, because its zygote ended too.
        """
        with self._lock:
            try:
                status: int | None = pickle.loads(self._ask(REAP + str(child.pid).encode(), [])[0])
            except GONE:
                status = None
        return status

    def _ask(self, request: bytes, fds: list[int]) -> tuple[bytes, list[int]]:
        socket.send_fds(self._sock, [request], fds)
        return receive(self._sock)

    def close(self) -> None:
        """End the zygote and its remaining children."""
        with self._lock:
            self._end()

    def hang_up(self) -> None:
        """Have it end, without waiting for that as :meth:`close` does, which must follow."""
        with self._lock:
            self._sock.close()

    def _end(self) -> None:
        self._sock.close()
        if not wait([self._ready], 0):  # still importing: it would notice the closed socket only afterwards
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._close_ready()
        if self._process is not None:
            self._process.wait()
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def _forked(self) -> None:
        """In a forked child: close our copy of the parent's socket, so that the zygote sees the parent end."""
        self._lock = concurrency.Lock()
        self._sock.close()
        self._close_ready()
        self._process = None

    @property
    def descriptors(self) -> tuple[int, int]:
        """Those that it takes in the trainer."""
        return self._sock.fileno(), self._ready

    def _close_ready(self) -> None:
        ready, self._ready = self._ready, -1
        if ready >= 0:  # otherwise it is closed already, and its number may be reused
            os.close(ready)


GONE = (EOFError, BrokenPipeError, ConnectionResetError)
_keepers: weakref.WeakSet[object] = weakref.WeakSet()


# Reentrant: the garbage collector may free an owner, and so call release, in the middle of borrow. Users are counted
# before the zygote is read, so that such a release never ends the zygote that borrow is about to return.
_lock = concurrency.RLock()
_shared: Zygote | None = None
_users = 0
_lasting: Zygote | None = None  # itself a user of the shared one


def borrow(workers: int = 0) -> Zygote:
    """The zygote that all loaders of this process share, started on first use, where ``workers`` will be asked of it.
    Each call must be paired with a :func:`release`."""
    global _shared, _users, _lasting
    with _lock:
        _users += 1
        try:
            if _shared is None:
                _shared = Zygote(workers)
                if not _shared.forked:
                    _lasting = _shared
                    _users += 1
        except BaseException:
            _users -= 1
            raise
        return _shared


def keep_for(owner: object) -> None:
    """Keep the zygote while ``owner`` lives, which may make loader after loader: each would start a zygote.

    If the trainer has threads (a progress bar's, say) a new zygote takes seconds.
    """
    if owner not in _keepers:
        _keepers.add(owner)
        weakref.finalize(owner, release, borrow())


@contextlib.contextmanager
def renewed(workers: int) -> Iterator[None]:
    """If only idle owners keep the zygote, and the trainer may be forked, have the next loader fork it as it is then.
    Workers see what the script has changed in modules since, as those of torch's loader do, which are forked too.

    The old one ends, and the new one begins and forks ``workers``, while the next loader makes its plan within this.
    """
    global _shared, _users
    with _lock:
        old = _shared
        renews = old is not None and old.forked and _users <= len(_keepers) and may_fork()
        if renews:
            _shared, _users = None, 0
            _keepers.clear()  # what these release later is no longer shared
    if old is None or not renews:
        yield
        return
    old.hang_up()
    try:
        new = borrow(workers)
        try:
            yield
        finally:
            release(new)
    finally:
        old.close()


def release(zygote: Zygote) -> None:
    """Give the zygote back; the last user ends it. Does nothing in a forked child, which does not own it."""
    global _shared, _users
    with _lock:
        if zygote is not _shared:
            return
        _users -= 1
        if _users:
            return
        _shared = None
    zygote.close()


def lasting() -> Zygote | None:
    """The one that lives as long as the trainer, if there is one."""
    return _lasting


def end_lasting() -> None:
    """Give back the one that lives as long as the trainer: the last loader's end is its own."""
    global _lasting
    with _lock:
        ended, _lasting = _lasting, None
    if ended is not None:
        release(ended)


atexit.register(end_lasting)


def _after_fork() -> None:
    """In a forked child: forget the parent's zygote; see also ``Zygote._forked``."""
    global _lock, _shared, _users, _lasting
    _lock, _shared, _users, _lasting = concurrency.RLock(), None, 0, None
    _keepers.clear()


forks.in_child(_after_fork)


def may_fork() -> bool:
    """Whether this process may be forked: it has no other Python thread, but for tqdm's monitor, and no context on an
    accelerator. The monitor holds no lock that a worker needs, unless its function draws a progress bar.

    Threads of native libraries' pools do not count: OpenBLAS ends and restarts its own around a fork, and the zygote
    sets the others' pools to one thread, as ``DataLoader``'s workers do. Those of the client of stores do.
    """
    if not hasattr(os, "fork") or sys.platform == "darwin":
        return False
    threads = [each for each in concurrency.enumerate() if type(each).__module__ != "tqdm._monitor"]
    if threads != [concurrency.main_thread()] or concurrency.current_thread() is not threads[0]:
        return False
    if forks.has_native_threads():  # a worker's request would never end
        return False
    from pipegraph.device.backend import is_initialized

    return not is_initialized()


def _fork_zygote(theirs: socket.socket, ready: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # None, closed, or of the user's own
            stream.flush()  # else every worker would print what they hold, when it ends
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about native threads; see may_fork
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        collects = gc.isenabled()
        gc.disable()
        _release_files(theirs.fileno(), ready)
        serve(theirs.detach(), ready, collects)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _start_interpreter(theirs: socket.socket, ready: int) -> subprocess.Popen[bytes]:
    fd = theirs.fileno()
    path = f"import gc, sys, json; gc.disable(); sys.path[:] = json.loads({json.dumps(sys.path)!r})"
    # As a fork would have them.
    names = sorted(name for name in list(sys.modules) if name.startswith("pipegraph."))
    code = f"{path}; from {serve.__module__} import serve; serve({fd}, {ready}, {gc.isenabled()}, {names!r})"
    code += "; import os; os._exit(0)"  # at once, as a fork does: the trainer waits for it when it exits
    options: Any = {"pass_fds": [fd, ready], "stdin": subprocess.DEVNULL}
    # In a process group of its own: a terminal's Ctrl-C would end it in the middle of its imports, with a traceback.
    return subprocess.Popen([sys.executable, "-c", code], process_group=0, **options)


def _release_files(*but: int) -> None:
    """Redirect every inherited descriptor to /dev/null, so that the trainer's files and sockets end when it closes
    them.

    They are not closed: objects that still have their numbers would later close descriptors that reuse these numbers.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in (*but, nothing):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.fstat(fd)
                os.dup2(nothing, fd, inheritable=False)
