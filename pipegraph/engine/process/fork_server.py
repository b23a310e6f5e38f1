"""The fork server, which runs in the zygote: forks worker processes on request until the trainer ends.

Processes that a worker's functions start do not outlive the worker: its process group gets SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Sequence
from typing import Any

from pipegraph.engine.process import surroundings
from pipegraph.global_generators import install

SPAWN, REAP, AHEAD = b"s", b"r", b"a"
"""The kind of a request: the first byte of its message. ``AHEAD``, which is not answered: fork so many processes now,
for requests to come."""
_PR_SET_PDEATHSIG = 1
_ROOM = 1 << 16

PRELOADED = (
    "torch",
    "numpy.random",
    "pipegraph.operators.functions",
    "pipegraph.engine.process.worker_life",
)
"""Modules that nearly every worker needs, imported once; others are imported when an operator is unpickled."""


def serve(fd: int, ready: int, collects: bool, names: Sequence[str] = ()) -> None:
    """Main function of the zygote: fork on request until the trainer ends. Writes to ``ready`` once it can.

    Args:
        collects: whether the garbage collector is on in the workers. It is off until here.
        names: modules to import besides those that nearly every worker needs.
    """
    _leave_signals_to_the_trainer()
    preload(names)
    sys.modules["torch"].set_num_threads(1)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)
    gc.freeze()  # never collect existing objects: a collection would write to their pages, which children share
    if collects:
        gc.enable()
    with contextlib.suppress(
        BrokenPipeError
    ):  # the trainer no longer needs it, as the closed socket will say
        os.write(ready, b"r")
    os.close(ready)
    with surroundings.socket_of(fd) as sock:
        _fork_on_request(sock)


def preload(names: Sequence[str] = ()) -> None:
    """Import and register what nearly every worker needs, and ``names``."""
    for name in (*PRELOADED, *names):
        importlib.import_module(name)
    install()


def _fork_on_request(sock: socket.socket) -> None:
    """Serve requests until the trainer ends."""
    workers: set[int] = set()
    ready: deque[tuple[int, socket.socket]] = (
        deque()
    )  # forked, with the line on which each waits for its descriptors
    while True:
        try:
            request, fds = receive(sock)
        except (EOFError, ConnectionResetError):
            break
        try:
            if request[:1] == REAP:
                pid = int(request[1:])
                socket.send_fds(sock, [pickle.dumps(_reaped(pid))], [])
                workers.discard(pid)
                continue
            try:
                for _ in range(int(request[1:]) if request[:1] == AHEAD else not ready):
                    ready.append(_fork_worker(sock, [line for _, line in ready]))
                    workers.add(ready[-1][0])
            except OSError as error:
                if request[:1] == SPAWN:
                    socket.send_fds(sock, [pickle.dumps((0, error))], [])
                continue
            if request[:1] == SPAWN:
                pid, line = ready.popleft()
                with (
                    line,
                    contextlib.suppress(BrokenPipeError, ConnectionResetError),
                ):  # it was killed meanwhile
                    socket.send_fds(line, [SPAWN], fds)
                sentinel = os.pidfd_open(pid)
                socket.send_fds(sock, [pickle.dumps((pid, None))], [sentinel])
                os.close(sentinel)
        except (BrokenPipeError, ConnectionResetError):
            break
        finally:
            for each in fds:
                os.close(each)
    for pid in workers:
        _end_group(pid)


def _fork_worker(zygote: socket.socket, lines: Sequence[socket.socket]) -> tuple[int, socket.socket]:
    """The pid of a new process, and our end of its line; in that process this does not return."""
    known = multiprocessing.Process()  # here, for each to have another number
    ours, theirs = surroundings.socket_pair(socket.SOCK_SEQPACKET)
    with theirs:
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            raise
        if not pid:
            _become_worker((zygote, ours, *lines), theirs, known)
    with contextlib.suppress(OSError):  # also here: one of the two comes first
        os.setpgid(pid, pid)
    return pid, ours


def _reaped(pid: int) -> int | None:
    """Reap a worker and end its process group; returns its exit status."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        _end_group(pid)  # before the worker is reaped: its process id cannot be reused until then
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # of the zygote before this one
        return None


def _end_group(pid: int) -> None:
    """Not with SIGKILL: multiprocessing's resource tracker must clean up, and ignores SIGTERM."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)


def _leave_signals_to_the_trainer() -> None:
    """Ignore the signals that a terminal or a scheduler sends to all processes of a job: the trainer handles them.

    They are caught, not set to be ignored, so that programs started by a worker have the defaults. Workers end when
    their sockets close, or by SIGKILL.
    """
    signal.set_wakeup_fd(-1)
    for each in signal.valid_signals():
        if callable(signal.getsignal(each)) or each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, _caught)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, a child's exit status would be lost


def _caught(signum: int, frame: object) -> None:
    pass


def _end_by_sigterm() -> None:
    with contextlib.suppress(ValueError):  # not forked by the main thread: only that one can set handlers
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _name_process(process: multiprocessing.Process, parent: int) -> None:
    """Be known to multiprocessing as a process with a parent, as its own are: code asks whether it is in a worker."""
    known: Any = multiprocessing.process
    known._current_process, known._children = process, set()
    known._parent_process = known._ParentProcess(process._parent_name, parent, os.pidfd_open(parent))  # type: ignore[attr-defined]


def _become_worker(
    zygotes: Sequence[socket.socket], line: socket.socket, process: multiprocessing.Process
) -> None:
    """Args: zygotes: what is the zygote's, and closed here. line: gives the worker's descriptors."""
    code = 1
    try:
        parent = os.getppid()
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        _name_process(process, parent)
        for each in zygotes:
            each.close()
        signal.signal(signal.SIGTERM, _caught)
        # Torch renews its thread pool at its first use in a fork; of two threads that do so at a time one fails.
        sys.modules["torch"].set_num_threads(1)
        # Processes forked by a user's function must end on SIGTERM: multiprocessing's pools wait for that.
        os.register_at_fork(after_in_child=_end_by_sigterm)
        worker_life = sys.modules["pipegraph.engine.process.worker_life"]
        try:
            with line:
                _, fds = receive(line)
        except EOFError:  # nobody has asked for it
            return
        surroundings.enter(fds[: surroundings.DESCRIPTORS])
        fds = fds[surroundings.DESCRIPTORS :]
        with surroundings.socket_of(fds[0]) as sock:
            code = worker_life.main(sock, *fds[1:]) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # None, closed, or of the user's own
                stream.flush()
        os._exit(code)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    data, fds, _, _ = socket.recv_fds(sock, _ROOM, 64)
    if not data:
        raise EOFError("the process that starts workers is gone")
    return data, fds
