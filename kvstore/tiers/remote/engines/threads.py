"""Threads that run what cannot be interrupted, for callers who do not wait for ever."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvstore.core.futures import SafeFuture
from kvstore.errors import RemoteUnavailable
from kvstore.tiers.remote.deadline import Deadline

T = TypeVar("T")


class Threads:
    """At most `most` daemon threads, started when needed. Thread-safe.

    A work that takes too long keeps its thread until it ends; the others go on. One that did not begin in time is not
    begun any more. No thread keeps the process from ending.

    Args:
        name: of the threads.
        most: how many there can be.

    Example:
        >>> threads = Threads("example", most=2)
        >>> threads.run(lambda: 6 * 7, Deadline(60))
        42
        >>> threads.close()
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._works: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._idle = 0
        self._closed = False

    def run(self, work: Callable[[], T], deadline: Deadline) -> T:
        """Return what `work` returns, or raise what it raises. Raises `RemoteTimeout` at the deadline; `work` may then
        go on."""
        return deadline.wait(self.submit(work))

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have `work` done; see `Deadline.wait`. Raises `RemoteUnavailable` after `close`."""
        future = SafeFuture[T]()
        with self._lock:
            if self._closed:
                raise RemoteUnavailable(f"{self._name} was closed")
            if self._idle:
                self._idle -= 1
            elif self._started < self._most:
                self._started += 1
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
            self._works.put((work, future))
        return future

    def close(self) -> None:
        """Let the threads end; works that have not begun raise `RemoteUnavailable`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in range(self._started):
                    self._works.put(None)

    def _serve(self) -> None:
        while (item := self._works.get()) is not None:
            work, future = item
            if future.set_running_or_notify_cancel():
                try:
                    if self._closed:
                        raise RemoteUnavailable(f"{self._name} was closed")
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del item, work, future
            with self._lock:
                self._idle += 1
