"""One server of Valkey or Redis as an engine."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engine import RemoteLimits
from kvstore.tiers.remote.engines.counts import Counts
from kvstore.tiers.remote.engines.resp.address import Address, Dialer
from kvstore.tiers.remote.engines.resp.connection import Connection, Login, number_of
from kvstore.tiers.remote.engines.resp.feed import ChangeFeed
from kvstore.tiers.remote.engines.resp.node import Node
from kvstore.tiers.remote.engines.resp.pool import Pool
from kvstore.tiers.remote.engines.writing import counted_put
from kvstore.tiers.remote.keys import check_keys, check_prefix

MAX_VALUE = 512 << 20  # of servers as they are configured by default


class RespEngine:
    """A `RemoteEngine` on one server: `valkey://` or `redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]`; with TLS
    `valkeys://` or `rediss://`.

    Connects when it is first asked for something, so a server that is down does not keep it from being opened. Needs
    Redis 7, or any Valkey, for `touch`; everything else works with Redis 5.

    Args:
        address: of the server.
        login: what it wants to know.
        tls: the context of a connection with TLS; None: without.
        connections: how many there can be.
        max_value_bytes: see `RemoteLimits`; the server's `proto-max-bulk-len` is the most.

    Example:
        >>> engine = RespEngine(Address("127.0.0.1", 6379))
        >>> engine.endpoint("kvs1/a"), engine.limits.has_change_feed
        ('resp:127.0.0.1:6379', True)
        >>> engine.close()
    """

    def __init__(
        self,
        address: Address,
        login: Login | None = None,
        tls: ssl.SSLContext | None = None,
        *,
        connections: int = 16,
        max_value_bytes: int = MAX_VALUE,
    ) -> None:
        self.limits = RemoteLimits(max_value_bytes, has_ttl=True, has_change_feed=True, parallel=connections)
        self._name = f"resp:{address}"
        self._counts = Counts()
        self._dialer = Dialer(tls)
        self._address = address
        self._login = login or Login()
        self._feeds: list[ChangeFeed] = []
        self._pool = Pool(self._dialer, address, self._login, connections)
        self._node = Node(self._pool)

    def endpoint(self, key: str) -> str:
        return self._name

    def get_into(self, key: str, buffer: memoryview, timeout_s: float) -> int | None:
        check_keys(key)
        with self._counts.call():
            size = self._node.get_into(key, buffer.cast("B"), Deadline(timeout_s))
            self._counts.add(bytes_read=size or 0)
            return size

    def put(
        self,
        key: str,
        parts: Sequence[memoryview | bytes],
        timeout_s: float,
        ttl_s: float | None = None,
        over: bool = False,
    ) -> bool:
        write = partial(self._node.put, key, ttl_s=ttl_s, over=over)
        return counted_put(self._counts, key, parts, self.limits.max_value_bytes, timeout_s, write)

    def exist(self, keys: Sequence[str], timeout_s: float) -> list[bool]:
        return [count > 0 for count in self._each("EXISTS", keys, timeout_s)]

    def touch(self, keys: Sequence[str], ttl_s: float, timeout_s: float) -> None:
        self._each("PEXPIRE", keys, timeout_s, str(max(1, int(ttl_s * 1000))), "GT")

    def delete(self, keys: Sequence[str], timeout_s: float) -> int:
        return sum(self._each("UNLINK", keys, timeout_s))

    def list(self, prefix: str, timeout_s: float) -> Iterator[str]:
        check_prefix(prefix)
        cursor = "0"
        while True:
            with self._counts.call():
                cursor, keys = self._node.scan(cursor, prefix, Deadline(timeout_s))
            yield from keys
            if cursor == "0":
                return

    def changes(self, prefix: str, callback: Callable[[Sequence[str] | None], None]) -> Callable[[], None]:
        """See `ChangingEngine.changes`. Needs a server of version 6 or later."""
        check_prefix(prefix)
        feed = ChangeFeed(
            lambda deadline: Connection(self._dialer, self._address, self._login, deadline), prefix, callback
        )
        self._feeds.append(feed)
        return feed.end

    def stats(self) -> Mapping[str, float]:
        feeds = {
            "feed_keys": sum(feed.keys for feed in self._feeds),
            "feed_losses": sum(feed.losses for feed in self._feeds),
        }
        return {**self._counts.values(), "connections_opened": self._pool.opened, **feeds}

    def close(self) -> None:
        for feed in self._feeds:
            feed.end()
        self._pool.close()
        self._dialer.close()

    def _each(self, verb: str, keys: Sequence[str], timeout_s: float, *options: str) -> Sequence[int]:
        check_keys(*keys)
        with self._counts.call():
            deadline = Deadline(timeout_s)
            return [number_of(reply) for reply in self._node.each(verb, keys, deadline, *options)]
