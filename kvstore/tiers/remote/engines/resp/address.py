"""Where a server is, and how it is reached."""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field

from kvstore.errors import RemoteGarbled, RemoteUnavailable
from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engines.resp.stream import PlainStream, Stream, TlsStream
from kvstore.tiers.remote.engines.threads import Threads

_KNOWN_S = 60.0  # for so long an address that was looked up is used
_HOST = re.compile(r"[A-Za-z0-9_.:%-]{0,255}", re.ASCII)  # a name or a number


@dataclass(frozen=True)
class Address:
    """A server's host and port.

    Example:
        >>> str(Address("127.0.0.1", 6379))
        '127.0.0.1:6379'
    """

    host: str
    port: int

    @classmethod
    def said(cls, host: str, port: int) -> Address:
        """Return an address that a server names. Raises `RemoteGarbled` if no server can have it."""
        if not _HOST.fullmatch(host) or not 0 < port < 1 << 16:
            raise RemoteGarbled(f"expected the address of a server, found {host[:60]!r}, port {port}")
        return cls(host, port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass
class Dialer:
    """Opens connections. Thread-safe.

    Names are looked up in a thread, since that cannot be interrupted, and remembered for a minute.

    Args:
        tls: with TLS, and this context.
    """

    tls: ssl.SSLContext | None = None
    _lookups: Threads = field(default_factory=lambda: Threads("kvstore-lookup", most=2))
    _known: dict[Address, tuple[str, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def dial(self, address: Address, deadline: Deadline) -> Stream:
        """Connect. Raises `RemoteTimeout` or `RemoteUnavailable`."""
        where = self._look_up(address, deadline)
        family = socket.AF_INET6 if ":" in where else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(deadline.left_s())
            connection.connect((where, address.port))
            if self.tls is None:
                return PlainStream(connection)
            connection.settimeout(deadline.left_s())
            return TlsStream(self.tls.wrap_socket(connection, server_hostname=address.host))
        except TimeoutError:
            connection.close()
            raise deadline.passed() from None
        except OSError as error:
            connection.close()
            with self._lock:
                self._known.pop(address, None)
            raise RemoteUnavailable(f"cannot connect to {address}: {error}") from error
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """End the threads."""
        self._lookups.close()

    def _look_up(self, address: Address, deadline: Deadline) -> str:
        try:
            return str(ipaddress.ip_address(address.host))
        except ValueError:
            pass
        with self._lock:
            where, until = self._known.get(address, ("", 0.0))
        if time.monotonic() < until:
            return where
        try:
            found = self._lookups.run(
                lambda: socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM), deadline
            )
        except (OSError, UnicodeError) as error:  # the second of what can be no name
            raise RemoteUnavailable(f"cannot find {address.host}: {error}") from error
        where = str(found[0][4][0])
        with self._lock:
            self._known[address] = where, time.monotonic() + _KNOWN_S
        return where
