"""Values in the memory of this process: for tests, and to try the remote tier without a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.errors import RemoteFull, RemoteUnavailable
from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engine import RemoteLimits
from kvstore.tiers.remote.engines.counts import Counts
from kvstore.tiers.remote.keys import check_keys, check_prefix
from kvstore.tiers.remote.values import byte_views, scatter, too_large


@dataclass
class Shelf:
    """What all engines of one name share: key -> (value, when it expires or None), and when each was written or
    touched last. `lock` guards the rest."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    values: dict[str, tuple[bytes, float | None]] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0

    def find(self, key: str) -> bytes | None:
        """Return a value that has not expired; the caller holds the lock."""
        value, end = self.values.get(key, (None, None))
        if value is None or end is None or time.monotonic() < end:
            return value
        self.remove(key)
        return None

    def remove(self, key: str) -> bool:
        """Return whether it was there; the caller holds the lock."""
        value, _ = self.values.pop(key, (None, None))
        self.used.pop(key, None)
        self.nbytes -= len(value or b"")
        return value is not None


_SHELVES: dict[str, Shelf] = {}
_SHELVES_LOCK = threading.Lock()


class MemoryEngine:
    """A `RemoteEngine` that is a dict: `memory:NAME`. Engines of one name in one process share their values, also after
    all were closed.

    Args:
        name: which values.
        max_bytes: more of them raise `RemoteFull`.
        max_value_bytes, parcel_bytes: see `RemoteLimits`.

    Example:
        >>> engine = MemoryEngine("example")
        >>> engine.put("kvs1/a", [b"va", b"lue"], timeout_s=1)
        True
        >>> buffer = memoryview(bytearray(8))
        >>> bytes(buffer[: engine.get_into("kvs1/a", buffer, timeout_s=1)])
        b'value'
    """

    def __init__(
        self, name: str, *, max_bytes: int = 1 << 40, max_value_bytes: int = 512 << 20, parcel_bytes: int = 0
    ) -> None:
        self._name = name
        self._max_bytes = max_bytes
        self._counts = Counts()
        self._closed = False
        self.limits = RemoteLimits(
            max_value_bytes, has_ttl=True, has_ages=True, keeps_use=True, parallel=64, parcel_bytes=parcel_bytes
        )
        with _SHELVES_LOCK:
            self._shelf = _SHELVES.setdefault(name, Shelf())

    def endpoint(self, key: str) -> str:
        return f"memory:{self._name}"

    def get_into(self, key: str, buffer: memoryview, timeout_s: float) -> int | None:
        with self._counts.call():
            self._begin(timeout_s, key)
            with self._shelf.lock:
                value = self._shelf.find(key)
            if value is None:
                return None
            if len(value) > buffer.nbytes:
                raise too_large(len(value), buffer.nbytes)
            buffer.cast("B")[: len(value)] = value
            self._counts.add(bytes_read=len(value))
            return len(value)

    def get_parts_into(self, key: str, offset: int, buffers: Sequence[memoryview], timeout_s: float) -> int | None:
        with self._counts.call():
            self._begin(timeout_s, key)
            with self._shelf.lock:
                value = self._shelf.find(key)
            if value is None:
                return None
            size = scatter(memoryview(value)[offset:], buffers)
            self._counts.add(bytes_read=size)
            return size

    def put(
        self,
        key: str,
        parts: Sequence[memoryview | bytes],
        timeout_s: float,
        ttl_s: float | None = None,
        over: bool = False,
    ) -> bool:
        with self._counts.call():
            self._begin(timeout_s, key)
            views, size = byte_views(parts, self.limits.max_value_bytes)
            value = b"".join(views)
            with self._shelf.lock:
                old = self._shelf.find(key)
                if old is not None and not over:
                    return False
                if self._shelf.nbytes - len(old or b"") + size > self._max_bytes:
                    raise RemoteFull(f"memory:{self._name} holds at most {self._max_bytes} bytes")
                self._shelf.remove(key)
                self._shelf.values[key] = value, None if ttl_s is None else time.monotonic() + ttl_s
                self._shelf.used[key] = time.monotonic()
                self._shelf.nbytes += size
            self._counts.add(bytes_written=size)
            return True

    def exist(self, keys: Sequence[str], timeout_s: float) -> list[bool]:
        with self._counts.call():
            self._begin(timeout_s, *keys)
            with self._shelf.lock:
                return [self._shelf.find(key) is not None for key in keys]

    def touch(self, keys: Sequence[str], ttl_s: float, timeout_s: float) -> None:
        with self._counts.call():
            self._begin(timeout_s, *keys)
            later = time.monotonic() + ttl_s
            with self._shelf.lock:
                for key in keys:
                    value, end = self._shelf.values.get(key, (None, None))
                    if value is not None:
                        self._shelf.used[key] = time.monotonic()
                    if value is not None and end is not None and time.monotonic() < end < later:
                        self._shelf.values[key] = value, later

    def ages(self, keys: Sequence[str], timeout_s: float) -> list[float | None]:
        with self._counts.call():
            self._begin(timeout_s, *keys)
            with self._shelf.lock:
                now, used = time.monotonic(), self._shelf.used
                return [now - used[key] if self._shelf.find(key) is not None else None for key in keys]

    def delete(self, keys: Sequence[str], timeout_s: float) -> int:
        with self._counts.call():
            self._begin(timeout_s, *keys)
            with self._shelf.lock:
                return sum(self._shelf.find(key) is not None and self._shelf.remove(key) for key in keys)

    def list(self, prefix: str, timeout_s: float) -> Iterator[str]:
        check_prefix(prefix)
        with self._counts.call():
            self._begin(timeout_s)
            with self._shelf.lock:
                names = [key for key in self._shelf.values if key.startswith(prefix)]
                return iter([key for key in names if self._shelf.find(key) is not None])

    def stats(self) -> Mapping[str, float]:
        return self._counts.values()

    def close(self) -> None:
        self._closed = True

    def _begin(self, timeout_s: float, *keys: str) -> None:
        check_keys(*keys)
        Deadline(timeout_s).left_s()
        if self._closed:
            raise RemoteUnavailable(f"memory:{self._name} was closed")
