"""What an engine did so far."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvstore.errors import RemoteError, RemoteTimeout


class Counts:
    """Counters of an engine. Thread-safe.

    Example:
        >>> counts = Counts()
        >>> with counts.call():
        ...     counts.add(bytes_read=7)
        >>> counts.values()["calls"], counts.values()["bytes_read"], counts.values()["failures"]
        (1, 7, 0)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = Counter({"calls": 0, "failures": 0, "timeouts": 0, "bytes_read": 0, "bytes_written": 0})

    def add(self, **more: int) -> None:
        """Add to counters by name."""
        with self._lock:
            self._values.update(more)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call, and how it fails."""
        self.add(calls=1)
        try:
            yield
        except RemoteError as error:
            self.add(failures=1, timeouts=int(isinstance(error, RemoteTimeout)))
            raise

    def values(self) -> Mapping[str, float]:
        """Return a copy of all counters."""
        with self._lock:
            return dict(self._values)
