"""The order in which a full disk gives up its records, where an eviction policy decides it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvstore.core.guard import Guard
from kvstore.eviction import EvictionPolicy

_AT_ONCE = 32  # of what waits, so much is told to the policy with each call


class Durable(NamedTuple):
    """A durable record, as its order is told of it.

    Attributes:
        record: its number.
        parent: that of the record before it in its prefix, or 0.
        nbytes: what it takes on disk.
        uses: how often it was used so far.
    """

    record: int
    parent: int
    nbytes: int = 0
    uses: int = 1


class DiskOrder:
    """One eviction policy over the durable records of a store.

    With the policy "lru" there is no such object: the trie keeps that order itself. Guarded by the lock of residency;
    every method asserts that the caller holds it (`Guard.check_held`).

    What a store finds on disk when it is opened may be much. It waits here, and what is used meanwhile behind it, so
    that the policy is told in the right order: a part with each call, all of it when a record has to go.

    Pinned records are set aside when the policy names one, so that it names each at most once. They come back, as new
    ones, when they are pinned no more.

    Args:
        policy: empty; nobody else uses it.
        guard: the lock of residency.
        is_kept: whether a record, or one that continues it, is pinned.
        may_go: whether the disk may give up a record now: nothing continues it, and nobody waits for it.

    Example:
        >>> from kvstore.core.guard import RESIDENCY
        >>> from kvstore.eviction import LeafFirstLFU
        >>> guard = Guard(RESIDENCY)
        >>> order = DiskOrder(LeafFirstLFU(), guard, is_kept=lambda record: record == 1, may_go=lambda record: True)
        >>> with guard:
        ...     order.written([1, 2], [Durable(1, 0), Durable(2, 1)])
        ...     order.written([3], [Durable(3, 0)])
        ...     order.victim()
        2
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        guard: Guard,
        is_kept: Callable[[int], bool],
        may_go: Callable[[int], bool],
    ) -> None:
        self._policy = policy
        self._guard = guard
        self._is_kept = is_kept
        self._may_go = may_go
        self._aside: set[int] = set()  # durable and pinned; the policy does not hold them
        self._waiting: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def load(self, records: Iterable[Durable]) -> None:
        """Take in what is durable when the store is opened.

        Args:
            records: by rising record number.
        """
        self._guard.check_held()
        self._waiting.extend((self._policy.add, record) for record in records)

    def written(self, path: Sequence[int], records: Iterable[Durable]) -> None:
        """Take in records that are durable from now on.

        Args:
            path: the records of their prefix, root first.
            records: root first.
        """
        self._guard.check_held()
        self._tell(self._policy.touch, path)
        for record in records:
            self._tell(self._policy.add, *record)

    def touch(self, path: Sequence[int]) -> None:
        """Count a use of one prefix, given root first; 0 stands for a missing record."""
        self._guard.check_held()
        self._tell(self._policy.touch, path)

    def forget(self, record: int) -> None:
        """Forget a record that the store forgets. Does nothing if it is not durable."""
        self._guard.check_held()
        self._tell(self._policy.discard, record)
        self._aside.discard(record)

    def unpinned(self, records: Iterable[int]) -> None:
        """Bring back those of these records, which are pinned no more, that were set aside."""
        self._guard.check_held()
        back = sorted(self._aside.intersection(records))
        self._aside.difference_update(back)
        for record in back:
            self._tell(self._policy.add, record)

    def victim(self) -> int:
        """Return the record that the disk is to give up next; 0 if no record may go. The caller forgets it."""
        self._guard.check_held()
        self._catch_up(len(self._waiting))
        chosen, kept = 0, []
        for record in self._policy.victims():
            if self._is_kept(record):
                kept.append(record)
            elif self._may_go(record):
                chosen = record
                break
        for record in kept:
            self._policy.discard(record)
        self._aside.update(kept)
        return chosen

    def held(self) -> frozenset[int]:
        """Return all durable records that are known here. Takes time in proportion to their number."""
        self._guard.check_held()
        self._catch_up(len(self._waiting))
        return frozenset(self._aside).union(self._policy.victims())

    def _tell(self, call: Callable[..., object], *arguments: Any) -> None:
        if self._waiting:
            self._waiting.append((call, arguments))
            self._catch_up(_AT_ONCE)
        else:
            call(*arguments)

    def _catch_up(self, most: int) -> None:
        for _ in range(min(most, len(self._waiting))):
            call, arguments = self._waiting.popleft()
            call(*arguments)
