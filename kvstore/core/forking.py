"""What must not be under way in one thread when another one forks the process."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

_busy = threading.RLock()


def no_fork() -> AbstractContextManager[object]:
    """Keep `os.fork` waiting while a block runs; one thread at a time. For what takes at most a second.

    Example:
        >>> with no_fork():
        ...     import fractions
    """
    return _busy


os.register_at_fork(before=_busy.acquire, after_in_parent=_busy.release, after_in_child=_busy.release)
