"""A server with TLS in front of one without."""

from __future__ import annotations

import select
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from threadruns import HANGS_S

CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgMABz1Sk2Gak4I7M2
lasVVlFh4Czpo4XHak3w1siFnXWhRANCAASTZk7egoNZvqQ71FMmyooAtIGoU+bC
+p6fygSmYyEPpihL6/tUQcXavjKwJTie1vSkhLD76zd1IkeQA6+mnsC2
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBnDCCAUGgAwIBAgIUOHcvFxd+v7FTuQn5brtsb0uJ/sAwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMzAzMjYwOFoYDzIxMjYxMDMw
MDMyNjA4WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAASTZk7egoNZvqQ71FMmyooAtIGoU+bC+p6fygSmYyEPpihL6/tUQcXa
vjKwJTie1vSkhLD76zd1IkeQA6+mnsC2o28wbTAdBgNVHQ4EFgQUMeqkZI4EqQCe
iGJb8UtLMCaPWq8wHwYDVR0jBBgwFoAUMeqkZI4EqQCeiGJb8UtLMCaPWq8wDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARhwR/AAABgglsb2NhbGhvc3QwCgYIKoZI
zj0EAwIDSQAwRgIhALtLYBhymwMWWVw+K91oOB9vAnpnSEnEzhggqCRcyRIDAiEA
vv04nrcWbaVzXjaV+MiHp8kvMpUV26abc0sT+duuyF0=
-----END CERTIFICATE-----
"""
"""A key, and a certificate of localhost signed with it, until the year 2126. For tests alone."""


_LOOKS_S = 0.01  # how often a server looks whether it is to end


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128


def trusting(folder: Path) -> ssl.SSLContext:
    """The context of clients that take the certificate."""
    return ssl.create_default_context(cafile=str(_file(folder)))


@contextmanager
def tls_in_front_of(port: int, folder: Path) -> Iterator[int]:
    """The port of a server with TLS that passes on all bytes, both ways."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(_file(folder))

    class Front(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)) as behind:
                with context.wrap_socket(self.request, server_side=True) as front:
                    _pass_on(front, behind)

    with _Server(("127.0.0.1", 0), Front) as server:
        threading.Thread(target=server.serve_forever, args=(_LOOKS_S,), daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def _pass_on(front: ssl.SSLSocket, behind: socket.socket) -> None:
    """One thread for both ways, since a TLS connection is not for two."""
    for one in (front, behind):
        one.setblocking(False)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    waiting = {front: b"", behind: b""}  # what is to be sent to each
    while True:
        ready = [front] if front.pending() else []
        writers = [one for one, text in waiting.items() if text]
        if not ready:
            select.select([front, behind], writers, [], HANGS_S)
        for source, target in ((front, behind), (behind, front)):
            with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                if len(waiting[target]) < 1 << 20:
                    text = source.recv(1 << 16)
                    if not text:
                        return
                    waiting[target] += text
            with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                if waiting[target]:
                    waiting[target] = waiting[target][target.send(waiting[target]) :]


def _file(folder: Path) -> Path:
    path = folder / "localhost.pem"
    path.write_text(CERTIFICATE)
    return path
