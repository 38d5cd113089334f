"""How long a call may still take."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from kvstore.errors import RemoteTimeout

T = TypeVar("T")


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

    def wait(self, future: Future[T]) -> T:
        """Return the result of a future, or raise what it raises. At this moment the future is cancelled, and
        `RemoteTimeout` raised; a result that is there already is returned afterwards, too."""
        try:
            return future.result(None if future.done() else self.left_s())
        except FutureTimeout:
            raise self.passed() from None
        finally:
            future.cancel()

    def passed(self) -> RemoteTimeout:
        """Return the error that says so."""
        return RemoteTimeout(f"the remote tier took longer than {self.timeout_s:.3f} s")
