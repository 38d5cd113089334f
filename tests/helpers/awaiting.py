"""Waiting for another thread without looking again and again: its own call tells."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def calls_of(
    owner: Any, method: str, count: int, of: Callable[..., bool] = lambda *_: True
) -> Iterator[threading.Event]:
    """An event that is set after the `count`-th call of `owner.method` whose arguments `of` accepts."""
    reached, lock, left = threading.Event(), threading.Lock(), [count]
    original = getattr(owner, method)

    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return original(*arguments, **named)
        finally:
            with lock:
                left[0] -= of(*arguments)
                if left[0] <= 0:
                    reached.set()

    with mock.patch.object(owner, method, call):
        yield reached
