"""The common base of policies that evict leaf records first, and what they count as one use of a prefix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from kvstore.eviction.forest import Leaves


class LeafFirst(ABC):
    """Base of an `EvictionPolicy`: children go before parents, and the prefix in use goes last.

    A store touches a prefix several times for one get or put, and adds records in between. Those calls are one use, and
    each record counts once in it: a call belongs to the same use as long as its path begins with the path before it, or
    the other way round (the correlated references of LRU-K, SIGMOD 1993).

    A subclass says where a used record stands (`_used`) and which record goes next (`_next`). Not thread-safe.

    Args:
        leaves: where the records stand; by default `Leaves()`.

    Example:
        First in, first out, for leaf records:

        >>> class FIFO(LeafFirst):
        ...     def _used(self, records, path):
        ...         for record in records:
        ...             if record not in self._leaves:
        ...                 self._leaves.place(record, "", (len(self), 0))
        ...
        ...     def _next(self):
        ...         return self._leaves.head("")
        >>> policy = FIFO()
        >>> for record, parent in [(1, 0), (2, 1), (3, 0)]:
        ...     policy.add(record, parent)
        >>> list(policy.victims())
        [2, 1, 3]
    """

    def __init__(self, leaves: Leaves | None = None) -> None:
        self._leaves = Leaves() if leaves is None else leaves
        self._path: list[int] = []
        self._parents: dict[int, int] = {}  # of the records of the path
        self._counted: set[int] = set()

    def __len__(self) -> int:
        return len(self._leaves)

    def add(self, record_id: int, parent: int = 0, nbytes: int = 0, uses: int = 1) -> None:
        """Hold a record; see `EvictionPolicy.add`. The path in use says better than `parent` what comes before it."""
        known = record_id in self._leaves
        if known and record_id in self._counted:
            return
        if known and record_id not in self._parents:
            self._counted = {record_id}  # used alone: a use of its own
        self._counted.add(record_id)
        self._used([record_id], self._path)
        if not known:
            self._leaves.link(record_id, self._parents.get(record_id, parent))
            if uses > 1:
                self._used_before(record_id, uses)

    def touch(self, path: Iterable[int]) -> None:
        """Count a use of one prefix, given root first, unless this path belongs to the use before it."""
        records = [record for record in path if record > 0]
        if not records:
            return
        common = min(len(records), len(self._path))
        if common == 0 or records[:common] != self._path[:common]:
            self._path = []
            self._counted.clear()
            self._begin(records)
        longer = len(records) > len(self._path)
        if longer:
            self._path = records
            self._parents = dict(zip(records, [0, *records], strict=False))
            self._leaves.in_use = set(records)
        held = [record for record in records if record in self._leaves]
        for record in held:
            self._leaves.link(record, self._parents[record])
        self._used([record for record in held if record not in self._counted], self._path)
        self._counted.update(held)
        if longer:
            self._extended(held, self._path)

    def discard(self, record_id: int) -> None:
        """Hold a record no longer. It counts as evicted if `victims` named it last time."""
        if record_id in self._leaves:
            self._gone(record_id, self._leaves.is_given(record_id))
            self._leaves.drop(record_id)
            self._counted.discard(record_id)

    def victims(self) -> Iterator[int]:
        """Name all held records, the first to give up first; the prefix in use comes last, its end before its root."""
        self._leaves.restore()
        while record := self._next():
            self._leaves.give(record)
            yield record
        yield from self._leaves.rest(self._path)

    def _begin(self, path: Sequence[int]) -> None:  # noqa: B027
        """Note that a new use begins.

        Args:
            path: the part of the prefix that is known now, root first.
        """

    def _extended(self, records: Sequence[int], path: Sequence[int]) -> None:  # noqa: B027
        """Note that the path of this use became longer.

        Args:
            records: those of the path that are held; each is counted in this use.
            path: the part of the prefix that is known now, root first.
        """

    @abstractmethod
    def _used(self, records: Sequence[int], path: Sequence[int]) -> None:
        """Place each record by `Leaves.place`. It is called once for each record of a use.

        Args:
            records: the used records, root first. One that is not held yet is held from now on.
            path: the part of the prefix that is known now, root first.
        """

    def _used_before(self, record: int, uses: int) -> None:  # noqa: B027
        """Note that a record that is held from now on was used before, as when a store is opened.

        Args:
            record: it was just placed by `_used`.
            uses: how often, this time among them.
        """

    @abstractmethod
    def _next(self) -> int:
        """Return the head (`Leaves.head`) that goes next; 0 for none."""

    def _gone(self, record: int, evicted: bool) -> None:  # noqa: B027
        """Note that a record is about to be held no longer.

        Args:
            record: it is still held.
            evicted: `victims` named it last time. Otherwise it was deleted, replaced or expired.
        """
