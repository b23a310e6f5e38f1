"""The four kinds of object stores on loopback, as far as reading and listing go, each with its own way to write etags."""

from __future__ import annotations

import http.server
import ssl
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

CHANGED = "Wed, 21 Oct 2026 07:28:00 GMT"

S3_ENTRY = (
    "<Contents><Key>{key}</Key><Size>{size}</Size><ETag>{etag}</ETag>"
    "<LastModified>2026-10-21T07:28:00.123Z</LastModified></Contents>"
)
AZURE_ENTRY = (
    "<Blob><Name>{key}</Name><Properties><Last-Modified>" + CHANGED + "</Last-Modified><Etag>{etag}</Etag>"
    "<Content-Length>{size}</Content-Length><Content-Type>a/b</Content-Type></Properties></Blob>"
)
WEBDAV_ENTRY = (
    "<d:response><d:href>{root}{key}</d:href><d:propstat><d:status>HTTP/1.1 200 OK</d:status><d:prop>"
    "<d:getcontentlength>{size}</d:getcontentlength><d:getetag>{etag}</d:getetag><d:resourcetype/>"
    "<d:getlastmodified>" + CHANGED + "</d:getlastmodified></d:prop></d:propstat></d:response>"
)
PAGES = {
    "s3": ("<ListBucketResult><IsTruncated>false</IsTruncated>", S3_ENTRY, "</ListBucketResult>"),
    "gs": ("<ListBucketResult><IsTruncated>false</IsTruncated>", S3_ENTRY, "</ListBucketResult>"),
    "az": (
        '<EnumerationResults ContainerName="data"><Blobs>',
        AZURE_ENTRY,
        "</Blobs><NextMarker/></EnumerationResults>",
    ),
    "http": ('<d:multistatus xmlns:d="DAV:">', WEBDAV_ENTRY, "</d:multistatus>"),
}


@dataclass
class Cloud:
    """A store that is being served.

    Args:
        kind: ``s3``, ``gs``, ``az`` or ``http``.
        objects: by key; may be changed at any time.
        instead: by key a status and headers, in place of an answer.
        listed, read: what is said of each object's etag, with ``{v}`` for its version; None: nothing.
    """

    kind: str
    objects: dict[str, bytes]
    listed: str | None = '"{v}"'
    read: str | None = '"{v}"'
    asked: list[tuple[str, str]] = field(default_factory=list)
    instead: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    port: int = 0

    @property
    def url(self) -> str:
        """Of the folder of all objects, with a slash at its end."""
        return f"http://127.0.0.1:{self.port}/data/" if self.kind == "http" else f"{self.kind}://data/"

    @property
    def options(self) -> dict[str, Any]:
        """For `StoreClient`."""
        here = f"http://127.0.0.1:{self.port}"
        if self.kind == "az":
            return {"endpoint": f"{here}/account", "account_name": "account", "skip_signature": True}
        if self.kind == "gs":
            return {"base_url": here, "skip_signature": True, "client_options": {"allow_http": True}}
        return {"endpoint": here, "region": "eu-1", "skip_signature": True} if self.kind == "s3" else {}


@contextmanager
def serve(cloud: Cloud, tls: ssl.SSLContext | None = None) -> Iterator[Cloud]:
    """Until the block ends."""
    root = "/account/data/" if cloud.kind == "az" else "/data/"

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            cloud.asked.append((self.command, self.path))
            where = urlsplit(self.path)
            query = parse_qs(where.query)
            key = unquote(where.path)[len(root) :]
            if key in cloud.instead:
                self._send(b"", *cloud.instead[key])
            elif self.command == "PROPFIND" or "list" in query.get("comp", ()) or "list-type" in query:
                self._send(
                    self._page(query.get("prefix", [key])[0], "delimiter" in query).encode(),
                    207 if cloud.kind == "http" else 200,
                )
            elif key in cloud.objects:
                self._object(cloud.objects[key])
            else:
                self._send(b"", 404)

        do_HEAD = do_PROPFIND = do_GET

        def _page(self, prefix: str, folder: bool) -> str:
            head, entry, tail = PAGES[cloud.kind]
            below = {
                key: key[len(prefix) :].partition("/") for key in cloud.objects if key.startswith(prefix)
            }
            if folder:
                deeper = sorted({prefix + name + "/" for name, slash, _ in below.values() if slash})
                head += "".join(
                    f"<CommonPrefixes><Prefix>{each}</Prefix></CommonPrefixes>" for each in deeper
                )
            found = [
                entry.format(
                    key=key, size=len(data), root=root, etag=(cloud.listed or "").format(v=zlib.crc32(data))
                )
                for key, data in sorted(cloud.objects.items())
                if key in below and not (folder and below[key][1])
            ]
            page = "".join(["<?xml version='1.0'?>", head, *found, tail])
            empty = ("<ETag></ETag>", "<Etag></Etag>", "<d:getetag></d:getetag>")
            for tag in empty if cloud.listed is None else ():
                page = page.replace(tag, "")
            return page

        def _object(self, data: bytes) -> None:
            headers = {"Last-Modified": CHANGED, "Accept-Ranges": "bytes"}
            if cloud.read is not None:
                headers["ETag"] = cloud.read.format(v=zlib.crc32(data))
            asked = self.headers.get("Range")
            if asked is None:
                return self._send(data, 200, headers)
            first, last = asked.removeprefix("bytes=").split("-")
            last = min(int(last), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            self._send(data[int(first) : last + 1], 206, headers)

        def _send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        if tls is not None:
            # The handshake is left to the handler's thread: a client that says nothing would keep all others out.
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        cloud.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield cloud
        finally:
            server.shutdown()
            thread.join()
