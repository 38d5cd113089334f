"""How long a call may still take."""

from __future__ import annotations

import math
import time

from kvstore.errors import RemoteTimeout


class Deadline:
    """A moment by this process's own steady clock. Immutable.

    Args:
        timeout_s: from now on.

    Example:
        >>> Deadline(60).left_s() > 59
        True
        >>> Deadline(0).left_s()
        Traceback (most recent call last):
        kvstore.errors.RemoteTimeout: the remote tier took longer than 0.000 s
    """

    __slots__ = ("_at", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        if not (math.isfinite(timeout_s) and timeout_s >= 0):
            raise ValueError(f"timeout_s: expected a finite number that is not negative, found {timeout_s!r}")
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return how long is left, more than 0. Raises `RemoteTimeout` if nothing is."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise self.passed()
        return left

    def passed(self) -> RemoteTimeout:
        """Return the error that says so."""
        return RemoteTimeout(f"the remote tier took longer than {self.timeout_s:.3f} s")
