"""One server of Valkey or Redis, and what is asked of it."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import RemoteGarbled
from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engines.resp.connection import command, refuse
from kvstore.tiers.remote.engines.resp.pool import Pool
from kvstore.tiers.remote.engines.resp.replies import ErrorReply, Reply
from kvstore.tiers.remote.keys import MAX_KEY, is_key

_AT_ONCE = 512  # commands in one step, so that neither side waits for the other to read
_SCAN = "1000"
_SPECIAL = str.maketrans({char: f"\\{char}" for char in "*?[]^-\\"})
_ASKING = command("ASKING")


class Node:
    """Commands to one server. Thread-safe.

    With `asking` a command is preceded by one that says that another node sent us here for this key. Every method
    raises `RemoteError`, and `Moved` if another node has the key.

    Args:
        pool: its connections.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def get_into(self, key: str, buffer: memoryview, deadline: Deadline, asking: bool = False) -> int | None:
        """See `RemoteEngine.get_into`."""
        with self.pool.connection(deadline) as connection:
            ask = b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key.encode())
            connection.send([_ASKING * asking + ask], 1 + asking, deadline)
            connection.replies(int(asking), deadline)
            reply = connection.value_into(buffer, deadline)
        if isinstance(reply, ErrorReply):
            refuse(reply)
        return reply if isinstance(reply, int) else None

    def put(
        self,
        key: str,
        views: Sequence[memoryview],
        deadline: Deadline,
        ttl_s: float | None,
        over: bool,
        asking: bool = False,
    ) -> bool:
        """See `RemoteEngine.put`."""
        size = sum(view.nbytes for view in views)
        options = [] if over else ["NX"]
        options += [] if ttl_s is None else ["PX", str(max(1, int(ttl_s * 1000)))]
        head = b"*%d\r\n" % (3 + len(options)) + command("SET", key)[4:] + b"$%d\r\n" % size
        tail = b"\r\n" + command(*options)[4:]
        with self.pool.connection(deadline) as connection:
            connection.send([_ASKING * asking + head, *views, tail], 1 + asking, deadline)
            reply = connection.replies(1 + asking, deadline)[-1]
        refuse(reply)
        if reply not in (b"OK", None):
            raise RemoteGarbled(f"expected the reply to SET, found {str(reply)[:60]}")
        return reply == b"OK"

    def each(
        self, verb: str, keys: Sequence[str], deadline: Deadline, *options: str, asking: bool = False
    ) -> list[Reply]:
        """Send one command for each key, and return their replies, which may be errors."""
        replies: list[Reply] = []
        with self.pool.connection(deadline) as connection:
            for begin in range(0, len(keys), _AT_ONCE):
                some = keys[begin : begin + _AT_ONCE]
                found = connection.ask(_commands(verb, some, options, asking), deadline)
                replies += found[1::2] if asking else found
        return replies

    def ask(self, words: Sequence[str], deadline: Deadline) -> Reply:
        """Return the reply to one command."""
        with self.pool.connection(deadline) as connection:
            (reply,) = connection.ask([command(*words)], deadline)
        refuse(reply)
        return reply

    def scan(self, cursor: str, prefix: str, deadline: Deadline) -> tuple[str, list[str]]:
        """Return (the next cursor, some keys). Begin with cursor "0"; when it comes back, all were seen."""
        pattern = prefix.translate(_SPECIAL) + "*"
        reply = self.ask(["SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN], deadline)
        if not (isinstance(reply, list) and len(reply) == 2 and isinstance(reply[0], bytes)):
            raise RemoteGarbled(f"expected the reply to SCAN, found {str(reply)[:60]}")
        cursor_bytes, found = reply
        if not (isinstance(cursor_bytes, bytes) and cursor_bytes.isdigit() and isinstance(found, list)):
            raise RemoteGarbled(f"expected the reply to SCAN, found {str(reply)[:60]}")
        names = [name.decode("ascii", "replace") for name in found if isinstance(name, bytes) and len(name) <= MAX_KEY]
        return cursor_bytes[:20].decode(), [name for name in names if name.startswith(prefix) and is_key(name)]


def _commands(verb: str, keys: Sequence[str], options: Sequence[str], asking: bool) -> list[bytes]:
    """As `command` of each, in less time."""
    head = b"*%d\r\n" % (2 + len(options)) + command(verb)[4:]
    tail = command(*options)[4:] if options else b""
    commands = [b"%b$%d\r\n%b\r\n%b" % (head, len(key), key.encode(), tail) for key in keys]
    return [part for one in commands for part in (_ASKING, one)] if asking else commands
