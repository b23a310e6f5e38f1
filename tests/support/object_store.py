"""An S3-compatible server for all tests of a process, and a proxy that spoils its answers."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import programs
import pytest

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """An S3-compatible server in a process of its own, with the bucket ``data``."""
    pytest.importorskip("moto", reason="make test-all installs it")
    pytest.importorskip("obstore", reason="the cloud extra brings obstore")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert select.select([process.stdout], [], [], programs.HANGS_S)[0]
            port = int(process.stdout.readline())
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=programs.LEFT_S)
            connection.request("PUT", "/data")
            assert connection.getresponse().status == 200
            connection.close()
            yield port
        finally:
            process.stdin.close()
            programs.end(process)


@pytest.fixture
def s3_options() -> Callable[[int], dict[str, Any]]:
    """Store options for a server on this machine."""
    return lambda port: {
        "endpoint": f"http://127.0.0.1:{port}",
        "region": "us-east-1",
        "access_key_id": "id-of-the-key",
        "secret_access_key": "very-secret-key",
        "virtual_hosted_style_request": False,
    }


class FaultyProxy:
    """Passes requests on to the S3 server, and spoils what `fault(method, path)` names.

    Faults: ``""`` (none), ``503`` (or another status), ``drop`` (the connection ends at once), ``cut`` (half
    of the body, then the connection ends), ``stall`` (half of the body, then nothing),
    ``late`` (nothing at all until `release`), ``flip`` (one bit of the body).
    """

    def __init__(self, upstream: int, port: int = 0) -> None:
        self.fault: Callable[[str, str], str] = lambda method, path: ""
        self.seen: list[tuple[str, str, str]] = []
        self.range = ""
        self._upstream, self._over = upstream, threading.Event()
        self._lock = threading.Lock()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy._pass_on(self)

            do_HEAD = do_PUT = do_GET

            def log_message(self, *args: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *args: object) -> None:
                pass  # clients that hang up are part of the game

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def release(self) -> None:
        """End what stalls and what is late."""
        self._over.set()

    def close(self) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _pass_on(self, request: http.server.BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        with self._lock:
            self.range = request.headers.get("Range", "")
            fault = self.fault(request.command, request.path)
            self.seen.append((request.command, self.range, fault))
        if fault == "late":
            self._over.wait()
        if fault == "drop":
            request.connection.shutdown(socket.SHUT_RDWR)
            request.close_connection = True
            return
        if fault.isdigit():
            request.send_response(int(fault))
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self._upstream)
        try:
            headers = dict(request.headers)
            headers.setdefault(
                "Authorization", "AWS4-HMAC-SHA256 Credential=a/20200101/us-east-1/s3/aws4_request"
            )
            upstream.request(request.command, request.path, body, headers)
            answer = upstream.getresponse()
            data = bytearray(answer.read())
        finally:
            upstream.close()
        if fault == "flip" and data:
            data[len(data) // 3] ^= 16
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                request.send_header(name, value)
        request.end_headers()
        if request.command == "HEAD":
            return
        if fault in ("cut", "stall"):
            request.wfile.write(data[: len(data) // 2])
            request.wfile.flush()
            if fault == "stall":
                self._over.wait()
            request.connection.shutdown(socket.SHUT_RDWR)
            request.close_connection = True
            return
        request.wfile.write(data)


@pytest.fixture
def new_proxy() -> Iterator[Callable[..., FaultyProxy]]:
    """Proxies, closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda *where: stack.enter_context(contextlib.closing(FaultyProxy(*where)))


@pytest.fixture
def proxy(s3_port: int, new_proxy: Callable[..., FaultyProxy]) -> FaultyProxy:
    return new_proxy(s3_port)


@pytest.fixture
def connect(s3_options: Callable[[int], dict[str, Any]]) -> Iterator[Callable[..., Any]]:
    """Store clients for a port, closed at the end."""
    from pipegraph.storage.stores import StoreClient

    with contextlib.ExitStack() as stack:
        yield lambda port, **more: stack.enter_context(StoreClient(s3_options(port), **more))
