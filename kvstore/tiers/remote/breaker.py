"""Stops asking a server that does not answer, and begins again by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# After so many failures in a row the breaker opens.
_FAILURES = 3
# It lets one call through after so long, and waits twice as long after each that fails. Its most is what a server that
# is back waits for at most.
_FIRST_S, _MOST_S = 0.25, 2.0


class Breaker:
    """Says whether a server may be asked. Thread-safe: `_lock` guards all fields.

    Closed: every call may be made. Open: none but a trial after a while; if that succeeds, the breaker closes.

    Args:
        clock: seconds that never go back.

    Example:
        >>> now = [0.0]
        >>> breaker = Breaker(lambda: now[0])
        >>> [breaker.failed() for _ in range(3)], breaker.is_open, breaker.is_due()
        ([False, False, True], True, False)
        >>> now[0] = 1.0
        >>> breaker.is_due(), breaker.is_due()  # one trial
        (True, False)
        >>> breaker.succeeded(), breaker.is_open
        (True, False)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._backoff_s = _FIRST_S
        self._next: float | None = None  # when the next trial is due; None while closed
        self._answered = -1.0  # when the server answered last
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether calls are refused."""
        return self._next is not None

    def is_due(self) -> bool:
        """Return whether a trial is to be made now. Whoever makes it says how it went."""
        with self._lock:
            now = self._clock()
            if self._next is None or now < self._next:
                return False
            self._next = now + _MOST_S  # no other trial meanwhile; should this one never end, the next comes then
            return True

    def succeeded(self) -> bool:
        """Note that the server answered; return whether that closed the breaker."""
        with self._lock:
            closed = self._next is not None
            self._failures, self._backoff_s, self._next, self._answered = 0, _FIRST_S, None, self._clock()
            return closed

    def failed(self, since: float | None = None) -> bool:
        """Note that the server did not answer; return whether that opened the breaker.

        since: when the call began. If another one was answered later, the server is only slow, and nothing is noted.
        """
        with self._lock:
            if self._next is None:
                if since is not None and self._answered >= since:
                    return False
                self._failures += 1
                if self._failures < _FAILURES:
                    return False
                self._next = self._clock() + self._backoff_s
                return True
            self._backoff_s = min(_MOST_S, 2 * self._backoff_s)
            self._next = self._clock() + self._backoff_s
            return False
