"""Work in C++ that threads of the program do outside of the calls of a store.

Python ends threads that are daemons wherever they are; in the middle of C++ that aborts the program. Calls of a store
are waited for when it is closed, and none begins then. What a thread does later with a result is done here. Tensors
that such a thread drops abort the program as well, for PyTorch lets go of the interpreter meanwhile. So a thread that
is refused at the end of the program does not go on, and drops nothing.
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
_REST_S = 5.0  # the end of a program takes less, but where an exit handler waits for the thread


def run(function: Callable[..., T], *arguments: object) -> T:
    """Make a call that the end of the program waits for, and return what it returns.

    Raises:
        StoreClosed: the program is ending, and this is not its main thread. A thread that is a daemon waits for the end
            first, for some seconds.
    """
    mine = threading.Lock()
    with mine:
        _running[mine] = os.getpid()
        try:
            if not _over or threading.current_thread() is threading.main_thread():
                return function(*arguments)
        finally:
            _running.pop(mine, None)
    if threading.current_thread().daemon:
        time.sleep(_REST_S)
    raise StoreClosed("the program is ending; take what is needed of a result before it does")


def end(timeout_s: float) -> None:
    """The program ends: let no call begin any more, and wait so long for those under way."""
    global _over
    _over = True
    until, own = time.monotonic() + timeout_s, os.getpid()
    for lock, pid in list(_running.items()):
        if pid == own and lock.acquire(timeout=max(0.0, until - time.monotonic())):
            lock.release()
