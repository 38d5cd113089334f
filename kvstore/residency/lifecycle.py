"""Who may use a store: nobody after `close()`, nobody in a forked child. Closing waits for calls under way. And which
calls are slow."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType

from kvstore.errors import StoreClosed, StoreForked
from kvstore.metrics import Metric, Metrics


class CallGuard:
    """A context manager around every call of a store; calls run in parallel.

    Thread-safe: the condition `_left` guards `_inside` and every write of `_closed`. `check` reads `_closed` without
    it, which is one reference; `__enter__` checks again under it.

    Example:
        >>> calls = CallGuard()
        >>> with calls:
        ...     pass  # a call
        >>> calls.close(), calls.close()
        (True, False)
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._inside = 0
        self._left = threading.Condition()

    def check(self) -> None:
        """Raise `StoreForked` or `StoreClosed` if a call may not begin."""
        if os.getpid() != self._pid:  # before any lock: another thread may have held it when the process forked
            raise StoreForked("the store was opened in the parent process; open it again in this one")
        if self._closed:
            raise StoreClosed("the store is closed; open it again")

    def __enter__(self) -> None:
        self.check()
        with self._left:
            self.check()
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._left:
            self._inside -= 1
            self._left.notify_all()

    @property
    def inside(self) -> int:
        """How many calls are under way."""
        return self._inside

    def close(self) -> bool:
        """Let no call begin any more, and return when the last one has ended.

        Returns:
            False if it was closed already.

        Raises:
            StoreForked: this is a forked child; the parent owns the store.
        """
        if os.getpid() != self._pid:
            self.check()
        with self._left:
            if self._closed:
                return False
            self._closed = True
            self._left.wait_for(lambda: not self._inside)
            return True


class SlowCall:
    """A context manager around one call that counts and logs it if it takes longer than `limit_s`; 0 for never.

    Example:
        >>> with SlowCall("get", 10.0, Metrics()):
        ...     pass  # the call
    """

    __slots__ = ("_begin", "_clock", "_limit_s", "_metrics", "_name")

    def __init__(
        self, name: str, limit_s: float, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._limit_s = limit_s
        self._metrics = metrics
        self._clock = clock

    def __enter__(self) -> None:
        self._begin = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = self._clock() - self._begin
        if 0 < self._limit_s < seconds:
            self._metrics.add(Metric.SLOW_CALLS, because=f"{self._name} took {seconds:.1f} s")
