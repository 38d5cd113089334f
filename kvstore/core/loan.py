"""Tensors that a caller lends to a call on another thread, and may want back before the call has read them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class TakenBack(Exception):
    """The caller has its tensors back, so that nothing may be read of them; who raises this has changed nothing."""


class _Here(threading.local):
    """The loan that the call of this thread reads."""

    loan: Loan | None = None


_here = _Here()


class Loan:
    """Tensors that a call reads which another thread makes, until their owner takes them back. Thread-safe.

    Example:
        >>> def put():
        ...     with reading():
        ...         return "copied"
        >>> loan = Loan()
        >>> loan.run(put), loan.take_back()
        ('copied', True)
        >>> loan.run(put)
        Traceback (most recent call last):
        kvstore.core.loan.TakenBack
    """

    def __init__(self) -> None:
        self._reading = threading.Lock()
        self._is_over = False

    def run(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Make a call that reads the tensors, on this thread."""
        before, _here.loan = _here.loan, self
        try:
            return call(*arguments, **options)
        finally:
            _here.loan = before

    def take_back(self) -> bool:
        """Let nothing be read any more; False while something is being read: ask again then."""
        if not self._reading.acquire(blocking=False):
            return False
        self._is_over = True
        self._reading.release()
        return True


@contextmanager
def reading() -> Iterator[None]:
    """A context in which tensors of the caller are read. Raises: TakenBack, if they are the caller's again."""
    loan = _here.loan
    if loan is None:
        yield
        return
    with loan._reading:
        if loan._is_over:
            raise TakenBack
        yield
