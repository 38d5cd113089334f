"""Connections to one server, kept open."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()  # of the connections that are not lent out
        for _ in range(most):
            self._places.put(None)
        self._idle: list[Connection] = []  # the last used is last; `append` and `pop` are each one step
        self._closed = False
        self.opened = 0

    @contextmanager
    def connection(self, deadline: Deadline) -> Iterator[Connection]:
        """Lend a connection.

        Raises:
            RemoteTimeout: all are lent out, or the server does not answer.
            RemoteError: a new one cannot be opened.
        """
        try:
            self._places.get(timeout=deadline.left_s())
        except queue.Empty:
            raise deadline.passed() from None
        try:
            connection = self._take() or self._open(deadline)
            try:
                yield connection
            finally:
                self._give_back(connection)
        finally:
            self._places.put(None)

    def close(self) -> None:
        """Close the connections that are not lent out, and each that is as it comes back."""
        self._closed = True
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().close()

    def _take(self) -> Connection | None:
        """An open connection, if there is one."""
        while self._idle and not self._closed:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if not connection.is_stale:
                return connection
            connection.close()
        return None

    def _open(self, deadline: Deadline) -> Connection:
        if self._closed:
            raise RemoteUnavailable(f"the connections to {self.address} were closed")
        self.opened += 1
        return Connection(self._dialer, self.address, self._login, deadline)

    def _give_back(self, connection: Connection) -> None:
        if connection.is_done:
            self._idle.append(connection)
        else:
            connection.close()
        if self._closed:
            self.close()
