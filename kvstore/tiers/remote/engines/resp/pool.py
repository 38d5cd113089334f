"""Connections to one server, kept open."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.errors import RemoteUnavailable
from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engines.resp.address import Address, Dialer
from kvstore.tiers.remote.engines.resp.connection import Connection, Login


class Pool:
    """At most `most` connections. Thread-safe.

    One that failed, or whose replies were not read to the end, is closed and not used again.

    Args:
        dialer, address, login: of new connections.
        most: who wants one more waits until one is free.
    """

    def __init__(self, dialer: Dialer, address: Address, login: Login, most: int) -> None:
        self.address = address
        self._dialer = dialer
        self._login = login
        self._places = threading.Semaphore(most)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []  # guarded by _lock, the last used is last
        self._closed = False
        self.opened = 0  # guarded by _lock

    @contextmanager
    def connection(self, deadline: Deadline) -> Iterator[Connection]:
        """Lend a connection.

        Raises:
            RemoteTimeout: all are lent out, or the server does not answer.
            RemoteError: a new one cannot be opened.
        """
        if not self._places.acquire(timeout=deadline.left_s()):
            raise deadline.passed()
        try:
            connection = self._take() or self._open(deadline)
            try:
                yield connection
            finally:
                self._give_back(connection)
        finally:
            self._places.release()

    def close(self) -> None:
        """Close the connections that are not lent out, and each that is as it comes back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self) -> Connection | None:
        while True:
            with self._lock:
                if self._closed:
                    raise RemoteUnavailable(f"the connections to {self.address} were closed")
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not connection.is_stale:
                return connection
            connection.close()

    def _open(self, deadline: Deadline) -> Connection:
        with self._lock:
            self.opened += 1
        return Connection(self._dialer, self.address, self._login, deadline)

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            keep = not self._closed and connection.is_done
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()
