"""A server that says what it was told to say, whatever it is asked."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from threadruns import HANGS_S

HELLO = b"%1\r\n$5\r\nproto\r\n:3\r\n"
Step = bytes | Callable[[socket.socket, threading.Event], None]


def silence(connection: socket.socket, over: threading.Event) -> None:
    over.wait(HANGS_S)


def byte_by_byte(text: bytes, pause_s: float) -> Step:
    """It never comes to an end of it by itself, if the pauses are long enough."""

    def say(connection: socket.socket, over: threading.Event) -> None:
        for byte in text:
            if over.wait(pause_s):
                return
            connection.sendall(bytes([byte]))

    return say


class Scripted:
    """Each connection gets the same script: a step for each request, then it is closed.

    Args:
        steps: what is sent, or done, after something was received.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self.over = threading.Event()
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def end(self) -> None:
        self.over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=HANGS_S)
        self._listener.close()

    def _accept(self) -> None:
        while not self.over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(HANGS_S)
            for step in self._steps:
                if not connection.recv(1 << 16):
                    return
                if isinstance(step, bytes):
                    connection.sendall(step)
                else:
                    step(connection, self.over)


@contextmanager
def scripted(*steps: Step) -> Iterator[Scripted]:
    server = Scripted(steps)
    try:
        yield server
    finally:
        server.end()
