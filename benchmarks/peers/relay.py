"""What stands between a client and a server, and can fall silent."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Passes on what comes at its port. While `is_silent`, it still takes connections and whatever is sent to it, and
    nothing comes out, on either side."""

    def __init__(self, port: int) -> None:
        self.is_silent = False
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one = self._listener.accept()[0]
                other = socket.create_connection(("127.0.0.1", self._to))
                for ends in ((one, other), (other, one)):
                    ends[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                if not self.is_silent:
                    target.sendall(piece)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def relay(port: int) -> contextlib.closing[Relay]:
    """A relay to a port of 127.0.0.1, for `with`."""
    return contextlib.closing(Relay(port))
