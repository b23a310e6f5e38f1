"""Programs in processes of their own, without waiting for their imports.

One interpreter for each test process has imported torch and pipegraph; every program is a fork of it that was made
before anything ran there. It has its own ``__main__``, arguments, environment, folder and standard files, and ends as
an interpreter ends. What a test says about importing needs a fresh interpreter.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

HANGS_S = 300
"""A program that takes longer is killed, and its test fails."""
AGAIN_S = 1
"""A Ctrl-C that arrives when Python has just begun to wait for a lock is noticed at the next signal: one that does
nothing else follows each second."""
LEFT_S = 60
"""For what is left when a process has been told to end, or has ended."""


class Ended(NamedTuple):
    """What a program left: its exit code, or the negative number of the signal that ended it, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


class _Pipe:
    """What comes out of it, as a text file would give it, without waiting."""

    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "rb", 0)
        self._decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)
        self.fileno, self.close = self._file.fileno, self._file.close
        self.text = ""

    @property
    def closed(self) -> bool:
        return self._file.closed

    def take(self) -> None:
        """What is there; at the end it is closed."""
        data = self._file.read(1 << 16)
        self.text += self._decoder.decode(data, final=not data)
        if not data:
            self.close()

    def give(self, count: int | None = None) -> str:
        """The first ``count`` characters that were taken, else all of them."""
        given = self.text[:count]
        self.text = self.text[len(given) :]
        return given


class Program:
    """A running program, with the methods of ``subprocess.Popen`` that tests need. It writes and reads text.

    Args:
        code: as for ``python -c``.
        arguments: ``sys.argv[1:]``.
        env: added to this process's.
        start_new_session: as ``subprocess.Popen`` has it.
    """

    def __init__(
        self,
        server: socket.socket,
        code: str,
        *arguments: Any,
        env: dict[str, str] | None = None,
        cwd: str | os.PathLike[str] = ".",
        start_new_session: bool = False,
    ) -> None:
        request = {
            "code": code,
            "argv": ["-c", *map(str, arguments)],
            "cwd": os.path.abspath(cwd),
            "env": {**os.environ, **(env or {})},
            "start_new_session": start_new_session,
        }
        pipes = [os.pipe() for _ in range(4)]
        (stdin, to), (out, stdout), (err, stderr), (self._status, status) = pipes
        theirs = [stdin, stdout, stderr, status]
        socket.send_fds(server, [json.dumps(request).encode()], theirs)
        for each in theirs:
            os.close(each)
        self.stdin, self._out, self._err = os.fdopen(to, "w"), _Pipe(out), _Pipe(err)
        self.returncode: int | None = None
        self._interrupted = False
        self.pid = self._number()

    def _number(self) -> int:
        data = os.read(self._status, 4)
        assert len(data) == 4, "the server of programs has ended"
        return int.from_bytes(data, "little", signed=True)

    def send_signal(self, number: int) -> None:
        """As ``Popen.send_signal``."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def interrupt(self, group: bool = False) -> None:
        """Ctrl-C, until it is noticed; ``group``: as a terminal sends it, to the processes of its session too."""
        self._interrupted = True
        (os.killpg if group else os.kill)(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """As ``Popen.kill``."""
        self.send_signal(signal.SIGKILL)

    def _read_until(self, done: Callable[[], bool], limit_s: float = HANGS_S) -> None:
        """Takes what it writes. A program that takes longer is killed, and its test fails with what came so far."""
        ends = time.monotonic() + limit_s
        while not (over := done()) and time.monotonic() < ends:
            files = [pipe for pipe in (self._out, self._err) if not pipe.closed]
            status = [self._status] if self.returncode is None else []
            ready = select.select([*files, *status], [], [], AGAIN_S)[0]
            if not ready and self._interrupted:
                self.send_signal(signal.SIGURG)
            for pipe in files:
                if pipe in ready:
                    pipe.take()
            if status and self._status in ready:
                self._ended()
        if not over:
            self.kill()
            if self.returncode is None:
                self._ended()
            self._out.close()
            self._err.close()
            raise AssertionError(
                f"the program, or what it started, took longer than {limit_s} s; "
                f"it wrote {self._out.text!r} and {self._err.text!r}"
            )

    def _ended(self) -> None:
        self.returncode = self._number()
        os.close(self._status)

    def readline(self) -> str:
        """The next line of its output, or what there is of it at its end."""
        self._read_until(lambda: "\n" in self._out.text or self._out.closed)
        return self._out.give(self._out.text.find("\n") + 1 or None)

    def wait(self) -> int:
        """Blocks until it has ended: the exit code."""
        self._read_until(lambda: self.returncode is not None)
        assert self.returncode is not None
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """Closes its input, blocks until it has ended: what it wrote that was not read yet."""
        self.stdin.close()
        self.wait()
        # What it started may still hold its output.
        self._read_until(lambda: self._out.closed and self._err.closed, LEFT_S)
        return self._out.give(), self._err.give()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.returncode is None:
            self.kill()
            self.communicate()


def end(process: subprocess.Popen[Any]) -> None:
    """Waits for one whose input has ended, and kills it where that takes long."""
    try:
        process.wait(LEFT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Server:
    """Starts the interpreter that programs are forks of; it ends with the ``with`` block."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys, programs; programs.serve(int(sys.argv[1]))",
                str(theirs.fileno()),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()

    def start(self, code: str, *arguments: Any, **options: Any) -> Program:
        """See :class:`Program`."""
        return Program(self._socket, code, *arguments, **options)

    def run(self, code: str, *arguments: Any, **options: Any) -> Ended:
        """Run a program to its end."""
        program = self.start(code, *arguments, **options)
        out, err = program.communicate()
        return Ended(program.wait(), out, err)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        end(self._process)


# -- in the server -----------------------------------------------------------------------------------


def serve(fd: int) -> None:
    """Forks for every request until nobody asks any more; comes back in each fork, and runs its program."""
    import gc

    import torch.distributed

    import pipegraph
    from pipegraph.engine.process import worker_life

    assert torch.distributed and worker_life
    for name in dir(pipegraph):
        getattr(pipegraph, name)
    for name in pipegraph.operators.__all__:
        getattr(pipegraph.operators, name)
    gc.freeze()
    asked = socket.socket(fileno=fd)
    poll, children, ended = select.poll(), {}, []
    poll.register(fd, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in children:
                poll.unregister(ready)
                os.close(ready)
                pid, status = children.pop(ready)
                ended.append(pid)
                found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
                os.write(status, code.to_bytes(4, "little", signed=True))
                os.close(status)
                continue
            while ended:  # until now their numbers could not become another's
                os.waitpid(ended.pop(), 0)
            message, files, _, _ = socket.recv_fds(asked, 1 << 20, 4)
            if not message:
                os._exit(0)
            if not (pid := os.fork()):
                asked.close()
                for each, (_, status) in children.items():
                    os.close(each)
                    os.close(status)
                return _run(json.loads(message), files)
            status = files.pop()
            for each in files:
                os.close(each)
            os.write(status, pid.to_bytes(4, "little", signed=True))
            sentinel = os.pidfd_open(pid)
            children[sentinel] = pid, status
            poll.register(sentinel, select.POLLIN)


def _run(request: dict[str, Any], files: list[int]) -> None:
    import faulthandler
    import random

    for number, each in enumerate(files[:3]):
        os.dup2(each, number)
    for each in files:
        os.close(each)
    if request["start_new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    random.seed()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored where the tests run in a shell's background
    signal.signal(signal.SIGURG, lambda *_: None)
    faulthandler.enable()
    sys.argv, sys.path[0] = request["argv"], ""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(request["code"], "<string>", "exec"), main.__dict__)
