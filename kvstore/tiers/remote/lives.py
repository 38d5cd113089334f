"""How long values of the remote tier live, as far as that is known: what lives too short is replaced."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

_MOST = 1 << 16  # of about 150 bytes each
_MORE = 1.5  # a block that lives longer by less is not written again


def outlives(expiry: float, there: float, now: float) -> bool:
    """Return whether a block lives so much longer than its value that the value is to be replaced.

    Args:
        expiry: of the block, seconds since 1970; 0 for never.
        there: the same of the value.

    Example:
        >>> outlives(0.0, 50.0, now=10.0), outlives(60.0, 50.0, now=10.0), outlives(90.0, 50.0, now=10.0)
        (True, False, True)
    """
    if not there:
        return False
    return not expiry or expiry - now > _MORE * max(0.0, there - now)


def end_of(life_s: float | None) -> float:
    """Return when a life ends that has so many seconds left, None for ever: seconds since 1970, 0 for never."""
    return 0.0 if life_s is None else time.time() + life_s


class Lives:
    """When the lives of values end, by the keys of their blocks. Thread-safe: `_lock` guards `_known`.

    Example:
        >>> lives = Lives()
        >>> lives.note(b"a", 1e9)
        >>> lives.of(b"a"), lives.of(b"b")
        (1000000000.0, None)
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, key: bytes) -> float | None:
        """Return when the life of a value ends, seconds since 1970, 0 for never; None if that is not known."""
        return self._known.get(key)

    def note(self, key: bytes, expiry: float) -> None:
        """The life of this value ends then."""
        with self._lock:
            self._known.pop(key, None)
            self._known[key] = expiry
            if len(self._known) > _MOST:
                self._known.popitem(last=False)
