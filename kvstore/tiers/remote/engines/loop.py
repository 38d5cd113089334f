"""A thread with an event loop, for libraries whose calls are coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvstore.errors import RemoteUnavailable
from kvstore.tiers.remote.deadline import Deadline

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for callers that wait until a deadline; what is late is cancelled. Thread-safe.

    Args:
        name: of the thread, which does not keep the process from ending. It starts with the first call.

    Example:
        >>> loop = LoopThread("example")
        >>> loop.run(lambda: asyncio.sleep(0, "done"), Deadline(60))
        'done'
        >>> loop.close()
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # guarded by _lock
        self._closed = False  # guarded by _lock

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], deadline: Deadline) -> T:
        """Return what the coroutine returns, or raise what it raises. Raises `RemoteTimeout` at the deadline."""
        loop = self._started()
        deadline.left_s()  # what is late is not begun
        return deadline.wait(asyncio.run_coroutine_threadsafe(work(), loop))

    def close(self) -> None:
        """Cancel what runs, and end the thread."""
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(_cancel_all, loop)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise RemoteUnavailable(f"{self._name} was closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True).start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    ended = asyncio.gather(*tasks, return_exceptions=True)
    ended.add_done_callback(lambda _: loop.stop())
