"""Futures that programs wait for, and may be interrupted while they do."""

from __future__ import annotations

from _thread import RLock
from concurrent.futures import Future
from typing import TypeVar

from kvstore.core.waiting import Bell

T = TypeVar("T")


class SafeFuture(Future[T]):
    """A future that stays whole wherever an interrupt (Ctrl-C, a time limit) hits whoever waits for it.

    That of `concurrent.futures` may stay locked then, and the thread that brings the result would wait for ever.

    Example:
        >>> future = SafeFuture()
        >>> future.set_result(3)
        >>> future.result()
        3
    """

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Lock()  # type: ignore[assignment]
        bell = self._bell = Bell()
        self.add_done_callback(lambda _: bell.ring())

    def result(self, timeout: float | None = None) -> T:
        try:
            self._wait(timeout)
            return super().result(0)
        finally:
            del self  # or what is raised would refer to itself, by way of this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        if not self._bell.wait_for(self.done, timeout):
            raise TimeoutError


class _Lock(RLock):  # type: ignore[misc]
    """Stands for the condition of a future, but C alone takes it and gives it back, and nobody waits with it."""

    def notify_all(self) -> None:
        """Wakes nobody."""
