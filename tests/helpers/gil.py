"""Whether a call gives the GIL away."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_NEVER_S = 100.0  # as long as a test takes nobody has to give the GIL away
_MOST_CALLS = 100_000


@contextmanager
def beside() -> Iterator[list[int]]:
    """Yield how often another thread has had the GIL: whenever somebody gives it away by himself."""
    turns, over = [0], threading.Event()

    def take() -> None:
        while not over.is_set():
            turns[0] += 1
            time.sleep(0)

    before = sys.getswitchinterval()
    thread = threading.Thread(target=take)
    thread.start()
    try:
        sys.setswitchinterval(_NEVER_S)
        yield turns
    finally:
        sys.setswitchinterval(before)
        over.set()
        thread.join()


def keeps_gil(call: Callable[[], object], times: int = 50) -> bool:
    """Return whether no other thread had the GIL while `call` was made so often."""
    with beside() as turns:
        first = turns[0]
        for _ in range(times):
            call()
        return turns[0] == first


def gives_gil(call: Callable[[], object]) -> bool:
    """Return whether another thread had the GIL while `call` was made, at last."""
    with beside() as turns:
        first = turns[0]
        return any((call(), turns[0] > first)[1] for _ in range(_MOST_CALLS))
