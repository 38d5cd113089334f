"""Locks that know who holds them and in what order they are taken: what `guarded by` in a comment means, asserted."""

from __future__ import annotations

import threading
from _thread import RLock
from types import TracebackType
from typing import ClassVar

# The order in which one thread may take them, when it takes more than one. Locks that are in no such list (of the
# memory tiers, the trie, the content index, the families, the write queue) are leaves: nothing is taken below them, but
# for the trie's, which the content index takes.
PUT, DISK_WRITE, DISK, RESIDENCY = range(4)
_NAMES = ("the put lock", "the disk's write lock", "the disk's lock", "the lock of residency")


class Guard(RLock):  # type: ignore[misc]
    """A re-entrant lock with a place in the order. Thread-safe.

    It is taken and given back by one call into C each: an interrupt of a `with` statement never leaves it held.

    Args:
        place: PUT, DISK_WRITE, DISK or RESIDENCY; a thread takes locks in this order.

    Attributes:
        enforced: whether `check_held` and the order are asserted, by guards that are made from then on. Tests turn it
            on; it costs a microsecond a lock.

    Example:
        >>> guard = Guard(RESIDENCY)
        >>> with guard:
        ...     guard.check_held()
    """

    enforced: ClassVar[bool] = False

    def __new__(cls, place: int) -> Guard:
        return super().__new__(_AssertingGuard if Guard.enforced else cls)

    def __init__(self, place: int) -> None:
        self.place = place

    def check_held(self) -> None:
        """Assert that the calling thread holds the lock, if that is enforced."""

    def __str__(self) -> str:
        return _NAMES[self.place]


class _Held(threading.local):
    """The guards that this thread holds, in the order in which it took them."""

    def __init__(self) -> None:
        self.guards: list[Guard] = []


class _AssertingGuard(Guard):  # type: ignore[misc]
    """A guard that asserts who holds it, and the order."""

    _held: ClassVar[_Held] = _Held()

    def __enter__(self) -> bool:  # type: ignore[override]
        held = self._held.guards
        above = [guard for guard in held if guard.place > self.place]
        assert self in held or not above, f"{self} was asked for while {above[0]} is held"
        self.acquire()
        held.append(self)
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in self._held.guards:
            self._held.guards.remove(self)
        self.release()

    def check_held(self) -> None:
        assert self in self._held.guards, f"{self} is not held"
