"""Calls that threads make at the same time, made one: a device codes many blocks in about the time of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar, cast

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(eq=False)
class _Call(Generic[Item, Result]):
    item: Item
    result: Result | None = None
    done: bool = False
    alone: bool = False  # it was part of a call that failed


class Together(Generic[Item, Result]):
    """Calls a function with the items of all threads that wait. Thread-safe.

    While one call is under way the items of other threads gather, and the first of these threads then works on all of
    them. A call that fails is made again for each item by itself, so that every thread gets its own result or error.

    Args:
        work: gives the results of one or more items, in order. Never called by two threads at once, but for items that
            failed together.
        most: how many items it is given at once.

    Example:
        >>> Together(lambda items: [2 * item for item in items], most=8)(21)
        42
    """

    def __init__(self, work: Callable[[Sequence[Item]], Sequence[Result]], most: int) -> None:
        self._work, self._most = work, most
        self._turn, self._lock = Lock(), Lock()
        self._waiting: list[_Call[Item, Result]] = []  # `_lock` guards it; taken from by whoever has the turn

    def __call__(self, item: Item) -> Result:
        call: _Call[Item, Result] = _Call(item)
        with self._lock:
            self._waiting.append(call)
        try:
            with self._turn:
                while not call.done and not call.alone:
                    self._next()
        finally:
            with self._lock:  # where an interrupt ended the wait
                if call in self._waiting:
                    self._waiting.remove(call)
        return cast(Result, call.result) if call.done else self._work([item])[0]

    def _next(self) -> None:
        with self._lock:
            calls, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
        try:
            results = self._work([call.item for call in calls])
            for call, result in zip(calls, results, strict=True):
                call.result, call.done = result, True
        except BaseException as error:
            for call in calls:
                call.alone = True
            if len(calls) == 1 or not isinstance(error, Exception):
                raise
