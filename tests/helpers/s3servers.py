"""A small S3 in this process: enough of it for the engine, with put-if-absent or without, and able to hang.

`make test-remote` asks the same of moto, which somebody else wrote.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from threadruns import HANGS_S


class S3Server(ThreadingHTTPServer):
    """Objects of any bucket by their path. `is_weak`: it replaces objects whatever it was told; `hangs`: it answers
    nothing until that is cleared."""

    daemon_threads = True

    def __init__(self, is_weak: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.is_weak = is_weak
        self.refuses = 0  # answered to everything, if not 0
        self.objects: dict[str, bytes] = {}
        self.written: dict[str, float] = {}  # when, in unix seconds
        self.ahead_s = 0.0  # how far the server's clock is ahead
        self.lock = threading.Lock()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.requests = 0
        self.parts = 0  # of them for a part of an object
        self.answered = 0  # what clients that gave up had asked for too

    @property
    def url(self) -> str:
        return f"s3://records?endpoint=http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that gave up


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # an answer in one piece: no wait of 40 ms between its head and its body
    server: S3Server
    modified = 0.0

    def do_GET(self) -> None:
        path, query = self._read()
        with self.server.lock:
            found = self.server.objects.get(path)
            self.modified = self.server.written.get(path, 0.0)
            if "list-type" in query:
                found = self._listing(path, query).encode()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found is not None and asked is not None:
            self._answer_part(found, int(asked[1]), int(asked[2]))
        else:
            self._answer(404 if found is None else 200, found or b"")

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        path, _ = self._read()
        with self.server.lock:
            is_taken = path in self.server.objects and not self.server.is_weak
            if not (is_taken and self.headers.get("If-None-Match") == "*"):
                self.server.objects[path] = self.body
                self.server.written[path] = time.time() + self.server.ahead_s
                is_taken = False
        self._answer(412 if is_taken else 200)

    def do_DELETE(self) -> None:
        path, _ = self._read()
        with self.server.lock:
            self.server.objects.pop(path, None)
        self._answer(204)

    def do_POST(self) -> None:  # DeleteObjects
        path, _ = self._read()
        names = [unquote(name) for name in re.findall(r"<Key>(.*?)</Key>", self.body.decode())]
        with self.server.lock:
            for name in names:
                self.server.objects.pop(f"{path.rstrip('/')}/{name}", None)
        done = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
        self._answer(200, f"<DeleteResult>{done}</DeleteResult>".encode())

    def log_message(self, *args: object) -> None:
        pass

    def _read(self) -> tuple[str, dict[str, list[str]]]:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.server.lock:
            self.server.requests += 1
        self.server.goes_on.wait(HANGS_S)
        parts = urlsplit(self.path)
        return unquote(parts.path), parse_qs(parts.query, keep_blank_values=True)

    def _listing(self, bucket: str, query: dict[str, list[str]]) -> str:
        bucket = bucket.rstrip("/") + "/"
        prefix = bucket + query.get("prefix", [""])[0]
        after = query.get("continuation-token", [""])[0]
        names = sorted(name for name in self.server.objects if name.startswith(prefix) and name > after)
        page, more = names[:50], len(names) > 50
        rows = "".join(
            f"<Contents><Key>{escape(name.removeprefix(bucket))}</Key><Size>{len(self.server.objects[name])}</Size>"
            '<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"x"</ETag></Contents>'
            for name in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        return f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{rows}{token}</ListBucketResult>"

    def _answer_part(self, value: bytes, first: int, last: int) -> None:
        self.server.parts += 1
        if first >= len(value):
            self._answer(416)
            return
        part = value[first : last + 1]
        self._answer(206, part, f"bytes {first}-{first + len(part) - 1}/{len(value)}")

    def _answer(self, status: int, body: bytes = b"", part: str = "") -> None:
        self.send_response(self.server.refuses or status)
        if part:
            self.send_header("Content-Range", part)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"x"')
        self.send_header("Last-Modified", formatdate(self.modified, usegmt=True))
        with self.server.lock:
            self.server.answered += 1
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def s3_server(is_weak: bool = False) -> Iterator[S3Server]:
    server = S3Server(is_weak)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join(timeout=HANGS_S)
