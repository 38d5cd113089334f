"""Bytes to and from a socket, until a deadline."""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from kvstore.errors import RemoteUnavailable
from kvstore.tiers.remote.deadline import Deadline

_MAX_PARTS = 512  # below IOV_MAX, which is 1024 on Linux
_SLACK_S = 0.002  # the kernel may wait longer by so much, and then is not told anew how long it may
_TIMEVAL = struct.Struct("@ll")
_ENDED = "the server closed the connection"


class Stream(Protocol):
    """A connection to one server. Raises `RemoteTimeout` at the deadline and `RemoteUnavailable` if it is broken; it is
    of no use after either."""

    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        """Send all parts, one after the other."""
        ...

    def receive(self, most: int, deadline: Deadline) -> bytes:
        """Receive from one byte to so many."""
        ...

    def fill(self, buffers: Sequence[memoryview], deadline: Deadline) -> None:
        """Receive until all buffers are full."""
        ...

    def is_stale(self) -> bool:
        """Return whether the server closed it, or said something that nobody asked for."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for something to receive, or for the end; return whether it came."""
        ...

    def close(self) -> None: ...


class PlainStream:
    """Over TCP.

    The kernel is told how long it may wait, and one call sends or receives all there is: fewer system calls, and fewer
    turns of Python's lock, than a call for each readiness.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._waits = {socket.SO_SNDTIMEO: -1.0, socket.SO_RCVTIMEO: -1.0}  # what the kernel was told
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        connection.settimeout(None)  # no timeouts but the kernel's

    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        left = parts
        while left:
            self._wait_at_most(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._socket.sendmsg(left[:_MAX_PARTS], (), socket.MSG_NOSIGNAL)
            except OSError as error:
                _raise(error, deadline)
            else:
                left = _behind(left, sent)

    def receive(self, most: int, deadline: Deadline) -> bytes:
        while True:
            self._wait_at_most(socket.SO_RCVTIMEO, deadline)
            try:
                found = self._socket.recv(most)
            except OSError as error:
                _raise(error, deadline)
            else:
                if not found:
                    raise RemoteUnavailable(_ENDED)
                return found

    def fill(self, buffers: Sequence[memoryview], deadline: Deadline) -> None:
        left: Sequence[memoryview | bytes] = [buffer for buffer in buffers if len(buffer)]
        while left:
            self._wait_at_most(socket.SO_RCVTIMEO, deadline)
            try:
                size = self._socket.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
            except OSError as error:
                _raise(error, deadline)
            else:
                if not size:
                    raise RemoteUnavailable(_ENDED)
                left = _behind(left, size)

    def is_stale(self) -> bool:
        return self.wait(0)

    def wait(self, timeout_s: float) -> bool:
        return bool(self._readable.poll(timeout_s * 1000))

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()

    def _wait_at_most(self, option: int, deadline: Deadline) -> None:
        left_s = deadline.left_s()
        if not 0 <= self._waits[option] - left_s <= _SLACK_S:
            wait_s = left_s + _SLACK_S / 2
            self._waits[option] = wait_s
            seconds = int(wait_s)
            self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, int((wait_s - seconds) * 1e6)))


class TlsStream:
    """Over TLS, whose bytes OpenSSL copies."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._socket = connection

    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        for part in parts:
            self._socket.settimeout(deadline.left_s())
            try:
                self._socket.sendall(part)  # the timeout is that of all of it
            except OSError as error:
                _raise(error, deadline)
                raise deadline.passed() from error  # a part of it was sent

    def receive(self, most: int, deadline: Deadline) -> bytes:
        found = bytearray(most)
        return bytes(found[: self._receive_into(memoryview(found), deadline)])

    def fill(self, buffers: Sequence[memoryview], deadline: Deadline) -> None:
        for buffer in buffers:
            done = 0
            while done < len(buffer):
                done += self._receive_into(buffer[done:], deadline)

    def is_stale(self) -> bool:
        if self._socket.pending():
            return True
        self._socket.settimeout(0)
        try:
            self._socket.recv(1)
        except (ssl.SSLWantReadError, BlockingIOError):
            return False
        except OSError:
            return True
        return True

    def wait(self, timeout_s: float) -> bool:
        return bool(self._socket.pending() or select.select([self._socket], [], [], timeout_s)[0])

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()

    def _receive_into(self, buffer: memoryview, deadline: Deadline) -> int:
        while True:
            self._socket.settimeout(deadline.left_s())
            try:
                size = self._socket.recv_into(buffer)
            except OSError as error:
                _raise(error, deadline)
            else:
                if not size:
                    raise RemoteUnavailable(_ENDED)
                return size


def _behind(parts: Sequence[memoryview | bytes], done: int) -> Sequence[memoryview | bytes]:
    """What is left of the parts after their first `done` bytes."""
    if done == sum(map(len, parts)):
        return ()
    left: list[memoryview | bytes] = []
    for part in parts:
        if done < len(part):
            left.append(memoryview(part)[done:] if done else part)
        done = max(0, done - len(part))
    return left


def _raise(error: OSError, deadline: Deadline) -> None:
    """Raise what a failed call means; nothing if it only waited, and there is time left."""
    is_of_settimeout = isinstance(error, TimeoutError) and error.errno is None
    if not is_of_settimeout and not isinstance(error, BlockingIOError):
        raise RemoteUnavailable(f"the connection broke: {error}") from error
    deadline.left_s()
