"""Threads that are started together and must all end, without an error of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable

HANGS_S = 600.0  # what no machine takes, however loaded


def run_together(*works: Callable[[], object]) -> None:
    """Runs each in a thread of its own; returns when all have ended. Raises the first error that one of them met."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HANGS_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
