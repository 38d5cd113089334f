"""Work in C++ that threads of the program do outside of the calls of a store.

Python ends threads that are daemons wherever they are; in the middle of C++ that aborts the program. Calls of a store
are waited for when it is closed, and none begins then. What a thread does later with a result is done here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvstore.errors import StoreClosed

T = TypeVar("T")

_running: dict[threading.Lock, int] = {}  # by the lock of each call, held while it runs: the process
_over = False


def run(function: Callable[..., T], *arguments: object) -> T:
    """Make a call that the end of the program waits for, and return what it returns.

    Raises:
        StoreClosed: the program is ending, and this is not its main thread.
    """
    mine = threading.Lock()
    with mine:
        _running[mine] = os.getpid()
        try:
            if _over and threading.current_thread() is not threading.main_thread():
                raise StoreClosed("the program is ending; take what is needed of a result before it does")
            return function(*arguments)
        finally:
            _running.pop(mine, None)


def end(timeout_s: float) -> None:
    """The program ends: let no call begin any more, and wait so long for those under way."""
    global _over
    _over = True
    until, own = time.monotonic() + timeout_s, os.getpid()
    for lock, pid in list(_running.items()):
        if pid == own and lock.acquire(timeout=max(0.0, until - time.monotonic())):
            lock.release()
