"""Who may use a store: nobody after `close()`, nobody in a forked child. Closing waits for calls under way. And which
calls are slow."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from kvstore.errors import StoreBusy, StoreClosed, StoreForked
from kvstore.metrics import Metric, Metrics
from kvstore.spans import CallSpan
from kvstore.timing import NOWHERE, Timing

T = TypeVar("T")
_TIMED = {"get": Timing.GET, "put": Timing.PUT}


def interrupted(what: str) -> StoreBusy:
    """Return the error for a call that would wait for what it interrupts."""
    return StoreBusy(
        f"{what} was interrupted in this thread by the code that makes this call (a signal handler, or a finalizer); "
        "let that code raise or set a flag, and call the store afterwards"
    )


class CallGuard:
    """Makes every call of a store; calls run in parallel.

    Which calls are under way is not counted: each has a lock of its own, held while it runs, which Python gives back
    however the call ends. Thread-safe.

    Example:
        >>> calls = CallGuard()
        >>> calls.run(len, "abc")
        3
        >>> calls.close(), calls.close()
        (True, True)
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._closed = False
        # By the lock of each call that began: its thread. One that was interrupted may stay here, with its lock free.
        self._began: dict[threading.Lock, int] = {}
        self._last = time.monotonic()  # when a call began or ended last

    def check(self) -> None:
        """Raise `StoreForked` or `StoreClosed` if a call may not begin."""
        if os.getpid() != self._pid:  # before any lock: another thread may have held it when the process forked
            raise StoreForked("the store was opened in the parent process; open it again in this one")
        if self._closed:
            raise StoreClosed("the store is closed; open it again")

    def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """Make a call of the store, and return what it returns.

        Raises:
            StoreForked, StoreClosed: no call may begin.
            StoreBusy: this thread is inside a call already.
        """
        self.check()
        mine = threading.get_ident()
        if mine in self._began.values():
            self._check_thread(mine)
        running = threading.Lock()
        with running:
            self._began[running] = mine
            self.check()  # again: `close` looks only at calls that it can see
            self._last = time.monotonic()
            result = call(*arguments)
            self._last = time.monotonic()
            del self._began[running]
        return result

    def _check_thread(self, mine: int) -> None:
        for running, thread in list(self._began.items()):
            if not running.locked():
                self._began.pop(running, None)
            elif thread == mine:
                raise interrupted("a call of this store")

    @property
    def idle_s(self) -> float:
        """Seconds since the last call ended; 0 while one is under way."""
        return 0.0 if self.inside else time.monotonic() - self._last

    @property
    def inside(self) -> int:
        """How many calls are under way."""
        return sum(running.locked() for running in list(self._began))

    def close(self, timeout_s: float | None = None) -> bool:
        """Let no call begin any more, and return when the last one has ended.

        Returns:
            False if `timeout_s` ran out before.

        Raises:
            StoreForked: this is a forked child; the parent owns the store.
            StoreBusy: this thread is inside a call.
        """
        if os.getpid() != self._pid:
            self.check()
        self._check_thread(threading.get_ident())
        self._closed = True
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for running in list(self._began):
            if not running.acquire(timeout=-1 if end is None else max(0.0, end - time.monotonic())):
                return False
            running.release()
        return True


class SlowCall:
    """A context manager around one call that counts and logs it if it takes longer than `limit_s`; 0 for never.

    It also times the call, and tells of it where somebody asked for that (`Metrics.spans`).

    Example:
        >>> with SlowCall("get", 10.0, Metrics()) as call:
        ...     call.returned(len("abc"))
        3
    """

    __slots__ = ("_begin", "_clock", "_limit_s", "_metrics", "_name", "_result", "_span")

    def __init__(
        self, name: str, limit_s: float, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._limit_s = limit_s
        self._metrics = metrics
        self._clock = clock
        self._result: object = None
        self._span: CallSpan | None = None

    def __enter__(self) -> SlowCall:
        if self._metrics.spans is not None:
            self._span = self._metrics.spans.begin(self._name)
        self._begin = self._clock()
        return self

    def returned(self, result: T) -> T:
        """Note what the call returns, and return it."""
        self._result = result
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = self._clock() - self._begin
        if (timing := _TIMED.get(self._name)) is not None:
            self._metrics.timings.observe(timing, seconds, getattr(self._result, "_where", NOWHERE))
        if 0 < self._limit_s < seconds:
            self._metrics.add(Metric.SLOW_CALLS, because=f"{self._name} took {seconds:.1f} s")
        if self._span is not None:
            self._span.end(self._result, error)
