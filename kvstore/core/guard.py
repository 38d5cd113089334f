"""Locks that know who holds them and in what order they are taken: what `guarded by` in a comment means, asserted."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import ClassVar

# The order in which one thread may take them, when it takes more than one. Locks that are in no such list (of the
# memory tiers, the trie, the content index, the families, the write queue) are leaves: nothing is taken below them.
PUT, DISK_WRITE, DISK, RESIDENCY = range(4)
_NAMES = ("the put lock", "the disk's write lock", "the disk's lock", "the lock of residency")


class _Held(threading.local):
    """The guards that this thread holds, in the order in which it took them."""

    def __init__(self) -> None:
        self.guards: list[Guard] = []


class Guard:
    """A re-entrant lock with a place in the order. Thread-safe.

    Args:
        place: PUT, DISK_WRITE, DISK or RESIDENCY; a thread takes locks in this order.

    Attributes:
        enforced: whether `check_held` and the order are asserted. Tests turn it on, before any guard is taken; it costs
            a microsecond a lock, and nothing where it is off.

    Example:
        >>> guard = Guard(RESIDENCY)
        >>> with guard:
        ...     guard.check_held()
    """

    enforced: ClassVar[bool] = False
    _held: ClassVar[_Held] = _Held()

    def __init__(self, place: int) -> None:
        self.place = place
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if self.enforced:
            held = self._held.guards
            above = [guard for guard in held if guard.place > self.place]
            assert self in held or not above, f"{self} was asked for while {above[0]} is held"
        self._lock.acquire()
        if self.enforced:
            self._held.guards.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enforced and self in self._held.guards:
            self._held.guards.remove(self)
        self._lock.release()

    def check_held(self) -> None:
        """Assert that the calling thread holds the lock, if that is enforced."""
        assert not self.enforced or self in self._held.guards, f"{self} is not held"

    def __str__(self) -> str:
        return _NAMES[self.place]
