"""A cluster of Valkey or Redis as an engine."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping, Sequence

from kvstore.errors import RemoteError
from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engine import RemoteLimits
from kvstore.tiers.remote.engines.counts import Counts
from kvstore.tiers.remote.engines.resp.address import Address, Dialer
from kvstore.tiers.remote.engines.resp.connection import Login
from kvstore.tiers.remote.engines.resp.engine import MAX_VALUE
from kvstore.tiers.remote.engines.resp.nodes import Nodes
from kvstore.tiers.remote.engines.resp.router import Router
from kvstore.tiers.remote.engines.writing import counted_put
from kvstore.tiers.remote.keys import check_keys, check_prefix


class ClusterEngine:
    """A `RemoteEngine` on a cluster: `valkey+cluster://` or `redis+cluster://[[USER]:PASSWORD@]HOST:PORT,HOST:PORT...`

    Keys go to the node that has their slot; `exist`, `touch` and `delete` ask each node once, all at the same time. A
    node that fails loses its own keys only: `exist` says False for them (`exist_unknown` in `stats()`), and the other
    two raise its error after all other nodes have done their part.

    Args:
        seeds: some of the nodes; the others are found through them.
        login: what the nodes want to know.
        tls: the context of connections with TLS; None: without.
        connections: how many there can be to each node.
        max_value_bytes: see `RemoteLimits`.

    Example:
        >>> engine = ClusterEngine([Address("127.0.0.1", 7001), Address("127.0.0.1", 7002)])
        >>> engine.limits.exist_batch
        256
        >>> engine.close()
    """

    def __init__(
        self,
        seeds: Sequence[Address],
        login: Login | None = None,
        tls: ssl.SSLContext | None = None,
        *,
        connections: int = 16,
        max_value_bytes: int = MAX_VALUE,
    ) -> None:
        self.limits = RemoteLimits(max_value_bytes, exist_batch=256, has_ttl=True, parallel=connections)
        self._name = "resp:" + ",".join(map(str, seeds))
        self._counts = Counts()
        self._nodes = Nodes(seeds, Dialer(tls), login or Login(), connections)
        self._router = Router(self._nodes, self._counts)

    def endpoint(self, key: str) -> str:
        owner = self._nodes.slots.owner(key)
        return self._name if owner is None else f"resp:{owner}"

    def get_into(self, key: str, buffer: memoryview, timeout_s: float) -> int | None:
        check_keys(key)
        with self._counts.call():
            deadline = Deadline(timeout_s)
            target = buffer.cast("B")
            size = self._router.one(key, deadline, lambda node, ask: node.get_into(key, target, deadline, ask))
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
        def write(views: list[memoryview], deadline: Deadline) -> bool:
            return self._router.one(key, deadline, lambda node, ask: node.put(key, views, deadline, ttl_s, over, ask))

        return counted_put(self._counts, key, parts, self.limits.max_value_bytes, timeout_s, write)

    def exist(self, keys: Sequence[str], timeout_s: float) -> list[bool]:
        check_keys(*keys)
        with self._counts.call():
            found = self._router.each("EXISTS", keys, Deadline(timeout_s))
            errors = [one for one in found if isinstance(one, RemoteError)]
            if errors and len(errors) == len(found):
                raise errors[0]
            self._counts.add(exist_unknown=len(errors))
            return [not isinstance(one, RemoteError) and one > 0 for one in found]

    def touch(self, keys: Sequence[str], ttl_s: float, timeout_s: float) -> None:
        check_keys(*keys)
        with self._counts.call():
            _all(self._router.each("PEXPIRE", keys, Deadline(timeout_s), str(max(1, int(ttl_s * 1000))), "GT"))

    def delete(self, keys: Sequence[str], timeout_s: float) -> int:
        check_keys(*keys)
        with self._counts.call():
            return sum(_all(self._router.each("UNLINK", keys, Deadline(timeout_s))))

    def list(self, prefix: str, timeout_s: float) -> Iterator[str]:
        """See `RemoteEngine.list`. Raises the error of a node that failed after the keys of all others."""
        check_prefix(prefix)
        with self._counts.call():
            members = self._nodes.all(Deadline(timeout_s))
        failed: RemoteError | None = None
        for member in members:
            try:
                cursor, begun = "0", False
                while cursor != "0" or not begun:
                    begun = True
                    with self._counts.call():
                        cursor, keys = member.node.scan(cursor, prefix, Deadline(timeout_s))
                    yield from keys
            except RemoteError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def stats(self) -> Mapping[str, float]:
        more = {"connections_opened": self._nodes.opened(), "slot_refreshes": self._nodes.refreshes}
        return {"exist_unknown": 0, "redirects": 0, **self._counts.values(), **more}

    def close(self) -> None:
        self._nodes.close()


def _all(found: Sequence[int | RemoteError]) -> Sequence[int]:
    """Raise the first error among them."""
    for one in found:
        if isinstance(one, RemoteError):
            raise one
    return [one for one in found if not isinstance(one, RemoteError)]
