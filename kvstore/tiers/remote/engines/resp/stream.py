"""Bytes to and from a socket, until a deadline."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from kvstore.errors import RemoteError, RemoteUnavailable
from kvstore.tiers.remote.deadline import Deadline

_MAX_PARTS = 512  # below IOV_MAX, which is 1024 on Linux


class Stream(Protocol):
    """A connection to one server. Raises `RemoteTimeout` at the deadline and `RemoteUnavailable` if it is broken; it is
    of no use after either."""

    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        """Send all parts, one after the other."""
        ...

    def receive(self, buffer: memoryview, deadline: Deadline, fill: bool) -> int:
        """Receive at least one byte, or with `fill` as many as the buffer takes; return how many."""
        ...

    def is_stale(self) -> bool:
        """Return whether the server closed it, or said something that nobody asked for."""
        ...

    def close(self) -> None: ...


class PlainStream:
    """Over TCP.

    The kernel is told how long it may wait before each call, and one call sends or receives all there is: fewer turns
    of Python's lock than a call for each readiness.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.settimeout(None)  # the two timeouts below are the kernel's

    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        left = list(parts)
        while left:
            some = left[:_MAX_PARTS]
            with _typed(deadline):
                self._wait_at_most(socket.SO_SNDTIMEO, deadline)
                sent = self._socket.sendmsg(some, (), socket.MSG_NOSIGNAL)
                left = [*_behind(some, sent), *left[_MAX_PARTS:]]

    def receive(self, buffer: memoryview, deadline: Deadline, fill: bool) -> int:
        size = 0
        while size < buffer.nbytes:
            with _typed(deadline):
                self._wait_at_most(socket.SO_RCVTIMEO, deadline)
                more = self._socket.recv_into(buffer[size:], 0, socket.MSG_WAITALL if fill else 0)
                if not more:
                    raise ConnectionResetError("the server closed the connection")
                size += more
                if not fill:
                    break
        return size

    def is_stale(self) -> bool:
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()

    def _wait_at_most(self, option: int, deadline: Deadline) -> None:
        seconds, micros = divmod(max(1, int(deadline.left_s() * 1e6)), 1_000_000)
        self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, micros))


class TlsStream:
    """Over TLS, whose bytes OpenSSL copies."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._socket = connection

    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        for part in parts:
            with _typed(deadline):
                self._socket.settimeout(deadline.left_s())
                self._socket.sendall(part)  # the timeout is that of all of it

    def receive(self, buffer: memoryview, deadline: Deadline, fill: bool) -> int:
        size = 0
        while size < buffer.nbytes:
            with _typed(deadline):
                self._socket.settimeout(deadline.left_s())
                more = self._socket.recv_into(buffer[size:])
                if not more:
                    raise ConnectionResetError("the server closed the connection")
                size += more
                if not fill:
                    break
        return size

    def is_stale(self) -> bool:
        if self._socket.pending():
            return True
        try:
            self._socket.settimeout(0)
            self._socket.recv(1)
        except (ssl.SSLWantReadError, BlockingIOError):
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()


def _behind(parts: Sequence[memoryview | bytes], sent: int) -> Iterator[memoryview | bytes]:
    """What is left of the parts after their first `sent` bytes."""
    for part in parts:
        if sent < len(part):
            yield memoryview(part)[sent:] if sent else part
        sent = max(0, sent - len(part))


@contextmanager
def _typed(deadline: Deadline) -> Iterator[None]:
    """Errors of sockets as ours. A wait that the kernel ended a moment early raises nothing: the caller waits on."""
    try:
        yield
    except RemoteError:
        raise
    except (BlockingIOError, TimeoutError):
        deadline.left_s()
    except OSError as error:
        raise RemoteUnavailable(f"the connection broke: {error}") from error
