"""When the learner may work: while nobody calls the store, in short steps, until it is stopped."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from kvstore.core.waiting import Flag

# A turn of a conversation, or a batch of gets, has pauses of milliseconds; a step of the learner takes up to some tens
# of them. So it begins one only if nobody called for as long as several of its steps take.
IDLE_S = 0.25
_LOWEST = 19  # priority of a thread, as `nice` has it


class Stopped(Exception):
    """The store is being closed: the learner ends. Internal."""


class Pace:
    """Lets one thread work in steps, between which it waits for the store to be idle. Thread-safe.

    Args:
        idle_s: seconds since the last call of the store ended; 0 while one is under way.

    Example:
        >>> pace = Pace(lambda: 1.0)
        >>> pace.step()
        >>> pace.stop()
        >>> pace.step()
        Traceback (most recent call last):
        kvstore.learning.pace.Stopped
    """

    def __init__(self, idle_s: Callable[[], float]) -> None:
        self._idle_s = idle_s
        self._stop = Flag()
        self.waits = True
        """False: somebody waits for the work, and it need not wait for anybody."""

    def stop(self) -> None:
        """Let the next step raise."""
        self._stop.set()

    def step(self) -> None:
        """Return when the next step may begin: at once if the store is idle.

        Raises:
            Stopped: the work is to end.
        """
        while not self._stop.is_set():
            missing = IDLE_S - self._idle_s() if self.waits else 0.0
            if missing <= 0:
                return
            self._stop.wait(missing)
        raise Stopped


def lower_priority() -> None:
    """Give the calling thread, and those that it starts, the lowest priority, where the system has one for threads."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
