"""What an engine did so far."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from kvstore.errors import RemoteError, RemoteTimeout

_ALWAYS = ("calls", "failures", "timeouts", "bytes_read", "bytes_written")


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
        self._values: Counter[str] = Counter(dict.fromkeys(_ALWAYS, 0))

    def add(self, **more: int) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, count in more.items():
                self._values[name] += count

    def call(self) -> Counts:
        """Count what is done within `with` as a call, and how it fails."""
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with self._lock:
            self._values["calls"] += 1
            self._values["failures"] += isinstance(error, RemoteError)
            self._values["timeouts"] += isinstance(error, RemoteTimeout)

    def values(self) -> Mapping[str, float]:
        """Return a copy of all counters."""
        with self._lock:
            return dict(self._values)
