"""One connection to a server, ready for commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import RemoteFull, RemoteGarbled, RemoteRefused, RemoteUnavailable
from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engines.resp.address import Address, Dialer
from kvstore.tiers.remote.engines.resp.replies import ErrorReply, Replies, Reply

_MOVED = re.compile(r"(MOVED|ASK) (\d{1,5}) ([^\s:]*|\[?[0-9a-fA-F:.]+\]?):(\d{1,5})")
_PASSING = ("LOADING", "CLUSTERDOWN", "TRYAGAIN", "BUSY", "MASTERDOWN", "UNBLOCKED", "ERR max number of clients")


class Moved(RemoteRefused):
    """A node of a cluster does not have the slot of a key; `address` does. With `once` only for this key."""

    def __init__(self, text: str, address: Address, once: bool) -> None:
        super().__init__(f"the server is one of a cluster, use redis+cluster://: {text}")
        self.address = address
        self.once = once


@dataclass(frozen=True)
class Login:
    """What a server wants to know of its clients."""

    user: str = ""
    password: str = ""
    database: int = 0

    def __repr__(self) -> str:
        return f"Login(user={self.user!r}, database={self.database})"


class Connection:
    """Commands and their replies, in order. Not thread-safe.

    Args:
        dialer: opens it.
        address: of the server.
        login: sent first.
        deadline: for all of that.

    Raises:
        RemoteRefused: the server does not take the password, or does not have that database.
        RemoteError: it cannot be reached, or is no such server.
    """

    def __init__(self, dialer: Dialer, address: Address, login: Login, deadline: Deadline) -> None:
        self.address = address
        self._stream = dialer.dial(address, deadline)
        self._replies = Replies(self._stream)
        self._due = 0  # replies that are still to be read
        try:
            self._log_in(login, deadline)
        except BaseException:
            self.close()
            raise

    @property
    def is_done(self) -> bool:
        """Whether every reply was read, and nothing else came: otherwise the next command would read the wrong one."""
        return self._due == 0 and self._replies.is_idle

    @property
    def is_stale(self) -> bool:
        """Whether the server closed the connection, or said what nobody asked for."""
        return self._stream.is_stale()

    def ask(self, commands: Sequence[bytes], deadline: Deadline) -> list[Reply]:
        """Send commands together; return their replies."""
        self.send([b"".join(commands)], len(commands), deadline)
        return self.replies(len(commands), deadline)

    def send(self, parts: Sequence[memoryview | bytes], replies: int, deadline: Deadline) -> None:
        """Send commands that will have so many replies."""
        self._due += replies
        self._stream.send(parts, deadline)

    def replies(self, count: int, deadline: Deadline) -> list[Reply]:
        """Read the next replies."""
        replies = self._replies.many(count, deadline)
        self._due -= count
        return replies

    def wait(self, timeout_s: float) -> bool:
        """Wait until the server says something, asked or not, or closes the connection; return whether it did."""
        return not self._replies.is_idle or self._stream.wait(timeout_s)

    def hear(self, deadline: Deadline) -> Reply:
        """Read what the server says next, asked or not."""
        return self._replies.many(1, deadline)[0]

    def value_into(self, buffer: memoryview, deadline: Deadline) -> int | ErrorReply | None:
        """Read the next reply, which is a value. Raises `RemoteTooLarge` if it does not fit."""
        reply = self._replies.value_into(buffer, deadline)
        self._due -= 1
        return reply

    def close(self) -> None:
        self._stream.close()

    def _log_in(self, login: Login, deadline: Deadline) -> None:
        user = login.user or "default"
        hello = ["HELLO", "3", *(["AUTH", user, login.password] if login.password else [])]
        (greeting,) = self.ask([command(*hello)], deadline)
        if isinstance(greeting, ErrorReply) and "unknown command" in greeting.text:  # of before 2020: version 2
            greeting = b""
            if login.password:
                words = ["AUTH", *([login.user] if login.user else []), login.password]
                (greeting,) = self.ask([command(*words)], deadline)
        refuse(greeting)
        if login.database:
            (chosen,) = self.ask([command("SELECT", str(login.database))], deadline)
            refuse(chosen)


def command(*words: str | bytes) -> bytes:
    """Return a command as bytes.

    Example:
        >>> command("GET", "kvs1/a")
        b'*2\\r\\n$3\\r\\nGET\\r\\n$6\\r\\nkvs1/a\\r\\n'
    """
    parts = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


def refuse(reply: Reply) -> None:
    """Raise what an `ErrorReply` means, `RemoteGarbled` if it names no server; do nothing for other replies."""
    if not isinstance(reply, ErrorReply):
        return
    if moved := _MOVED.fullmatch(reply.text):
        kind, _, host, port = moved.groups()
        raise Moved(reply.text, Address.said(host.strip("[]"), int(port)), once=kind == "ASK")
    if reply.text.startswith("OOM"):
        raise RemoteFull(f"the server has no room: {reply.text}")
    if reply.text.startswith(_PASSING):
        raise RemoteUnavailable(f"the server is not ready: {reply.text}")
    raise RemoteRefused(f"the server refused: {reply.text}")


def number_of(reply: Reply) -> int:
    """Return the number that a reply is. Raises what an `ErrorReply` means, and `RemoteGarbled` for other replies."""
    refuse(reply)
    if not isinstance(reply, int):
        raise RemoteGarbled(f"expected a number, found {str(reply)[:60]}")
    return reply
