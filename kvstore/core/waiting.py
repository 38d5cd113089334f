"""Waiting for a change that another thread makes, so that an interrupt of the wait leaves nothing behind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

# A ring that was interrupted may reach nobody: whoever waits looks for itself after so long.
_LOOK_S = 1.0


class Flag:
    """Something that has happened, or not yet; others wait for it. Thread-safe, also where an interrupt hits a call.

    Does what `threading.Event` does, which an interrupt may leave locked.

    Example:
        >>> flag = Flag()
        >>> flag.wait(0.001), flag.set(), flag.wait(0.001), flag.clear(), flag.is_set()
        (False, None, True, None, False)
    """

    def __init__(self) -> None:
        self._is_set = False
        self._bell = Bell()

    def is_set(self) -> bool:
        """Return whether it has happened."""
        return self._is_set

    def set(self) -> None:
        """Say that it has happened."""
        self._is_set = True
        self._bell.ring()

    def clear(self) -> None:
        """Say that it has not happened again yet."""
        self._is_set = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True as soon as it has happened, or False after `timeout_s`."""
        return self._bell.wait_for(self.is_set, timeout_s)


class Bell:
    """Wakes those who wait for a change. Thread-safe; needs no lock, and no lock is held during a wait.

    `threading.Condition` would leave its lock held, or give back another thread's, where an interrupt (Ctrl-C, a time
    limit) hits one of its Python lines. Here every step is one call into C.

    Example:
        >>> bell, done = Bell(), []
        >>> bell.wait_for(lambda: done, timeout_s=0.001)
        False
        >>> thread = threading.Thread(target=lambda: (done.append(1), bell.ring()))
        >>> thread.start()
        >>> bell.wait_for(lambda: done)
        True
    """

    def __init__(self) -> None:
        self._waiting: deque[threading.Lock] = deque()  # each is held, until it is released to wake its owner

    def ring(self) -> None:
        """Let everybody who waits look again."""
        while self._waiting:
            try:
                waiting = self._waiting.popleft()
            except IndexError:
                return  # another thread rang
            waiting.release()

    def wait_for(self, is_met: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Return True as soon as `is_met` does, or False after `timeout_s`.

        Whoever makes it true rings afterwards.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_met():
            left = _LOOK_S if end is None else min(_LOOK_S, end - time.monotonic())
            if left <= 0:
                return False
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
            if not is_met():
                mine.acquire(timeout=left)
            with contextlib.suppress(ValueError):
                self._waiting.remove(mine)
        return True
