"""The S3-compatible server of reader_idle.py: moto on loopback, and each rank's line of fixed bandwidth to it.

Also run as a script, by an interpreter that has a peer: ``reader_idle_store.py FOLDER`` writes the same samples
as MDS shards.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARTS, SAMPLES, SAMPLE_NBYTES = 36, 1024, 8_000

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


class Line:
    """A fixed number of bytes per second, shared by all connections of one rank."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock, self._free_at = rate, threading.Lock(), 0.0

    def take(self, nbytes: int) -> None:
        """Blocks until the line is free and these bytes would have passed."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._rate
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


class Throttle:
    """A port that leads to another, answers at a fixed rate. `close` ends its threads."""

    def __init__(self, upstream: int, rate: float) -> None:
        self._upstream, self._line = upstream, Line(rate)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                server = socket.create_connection(("127.0.0.1", self._upstream))
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass_on, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(server, client, True), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, throttled: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(64 << 10):
                if throttled:
                    self._line.take(len(data))
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        if throttled:
            source.close()
            target.close()


def options(port: int) -> dict[str, Any]:
    """Of the store, for obstore."""
    return {
        "endpoint": f"http://127.0.0.1:{port}",
        "region": "us-east-1",
        "access_key_id": "id",
        "secret_access_key": "secret",
        "virtual_hosted_style_request": False,
    }


@contextlib.contextmanager
def server() -> Iterator[int]:
    """The port of a moto server in a process of its own, with the bucket ``data``."""
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    quiet = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as process:  # type: ignore[call-overload]
        port = int(process.stdout.readline())
        try:
            import http.client

            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("PUT", "/data")
            assert connection.getresponse().status == 200
            connection.close()
            yield port
        finally:
            process.stdin.close()


def upload(port: int, folder: Path, prefix: str = "") -> None:
    """Every file of a folder, as objects of the bucket."""
    import obstore
    from obstore.store import from_url

    store = from_url("s3://data", client_options={"allow_http": True, "timeout": "60s"}, **options(port))
    for path in sorted(folder.iterdir()):
        obstore.put(store, prefix + path.name, path.read_bytes())


def write_tar(folder: Path) -> None:
    """The data as tar shards, ``part-000.tar`` ..."""
    rng = random.Random(0)
    for part in range(PARTS):
        with tarfile.open(folder / f"part-{part:03}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for number in range(SAMPLES):
                info = tarfile.TarInfo(f"{part:03}-{number:04}.bin")
                info.size = SAMPLE_NBYTES
                archive.addfile(info, io.BytesIO(rng.randbytes(SAMPLE_NBYTES)))


def write_mds(folder: str) -> None:
    """The same samples as MDS shards of the same size, for MosaicML Streaming."""
    from streaming import MDSWriter

    rng = random.Random(0)
    with MDSWriter(out=folder, columns={"bin": "bytes"}, size_limit=SAMPLES * (SAMPLE_NBYTES + 20)) as out:
        for _ in range(PARTS * SAMPLES):
            out.write({"bin": rng.randbytes(SAMPLE_NBYTES)})


if __name__ == "__main__":
    # Other benchmarks lie beside this one, and must not hide packages of the same name.
    sys.path.remove(str(Path(__file__).parent))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    write_mds(sys.argv[1])
