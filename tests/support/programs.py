"""Programs in processes of their own, without waiting for their imports.

One interpreter for each test process has imported torch and pipegraph; every program is a fork of it that was made
before anything ran there. It has its own ``__main__``, arguments, environment, folder and standard files, and ends as
an interpreter ends. What a test says about importing needs a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from typing import Any, NamedTuple

HANGS_S = 300
"""A program that takes longer is killed, and its test fails."""
AGAIN_S = 1
"""A Ctrl-C that arrives when Python has just begun to wait for a lock is noticed at the next signal: one that does
nothing else follows each second."""


class Ended(NamedTuple):
    """What a program left: its exit code, or the negative number of the signal that ended it, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


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
        self.stdin, self.stdout, self.stderr = os.fdopen(to, "w"), os.fdopen(out), os.fdopen(err)
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
            self._interrupted |= number == signal.SIGINT
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """As ``Popen.kill``."""
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Blocks until it has ended: the exit code."""
        if self.returncode is None:
            for _ in range(HANGS_S // AGAIN_S):
                hangs = not select.select([self._status], [], [], AGAIN_S)[0]
                if not hangs:
                    break
                if self._interrupted:
                    self.send_signal(signal.SIGURG)
            if hangs:
                self.kill()
            self.returncode = self._number()
            os.close(self._status)
            assert not hangs, f"the program took longer than {HANGS_S} s"
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """Closes its input, blocks until it has ended: what it wrote that was not read yet."""
        self.stdin.close()
        found = ["", ""]

        def read(index: int, file: Any) -> None:
            found[index] = file.read()

        readers = [threading.Thread(target=read, args=each) for each in ((0, self.stdout), (1, self.stderr))]
        for reader in readers:
            reader.start()
        try:
            self.wait()
        finally:
            for reader in readers:
                reader.join()
            self.stdout.close()
            self.stderr.close()
        return found[0], found[1]

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.returncode is None:
            self.kill()
            self.communicate()


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
        self._process.wait()


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
