"""What one use of a prefix is: the calls of a tier that belong together count once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from kvstore.eviction.forest import Leaves


class LeafFirst(ABC):
    """An `EvictionPolicy` over `Leaves`: children before parents, and the prefix in use after all others.

    A store touches a prefix several times for one get or put, and adds its records in between. As long as a touched
    path begins with the one before it, or the other way round, it is the same use, and a record counts once in it
    (the correlated references of LRU-K, SIGMOD 1993). Of the latest path the policy knows the order also of the
    records that are not held yet; where a record is added before any path names it, the next touch tells its parent.

    Subclasses say where a record stands (`_used`) and which goes next (`_next`).
    """

    def __init__(self, leaves: Leaves | None = None) -> None:
        self._leaves = Leaves() if leaves is None else leaves
        self._path: list[int] = []
        self._parents: dict[int, int] = {}  # of the records of the path
        self._counted: set[int] = set()

    def __len__(self) -> int:
        return len(self._leaves)

    def add(self, record_id: int) -> None:
        known = record_id in self._leaves
        if known and record_id in self._counted:
            return
        if known and record_id not in self._parents:
            self._counted = {record_id}  # used alone: a use of its own
        self._counted.add(record_id)
        self._used([record_id], self._path)
        if not known:
            self._leaves.link(record_id, self._parents.get(record_id, 0))

    def touch(self, path: Iterable[int]) -> None:
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
        if record_id in self._leaves:
            self._gone(record_id, self._leaves.is_given(record_id))
            self._leaves.drop(record_id)
            self._counted.discard(record_id)

    def victims(self) -> Iterator[int]:
        self._leaves.restore()
        while record := self._next():
            self._leaves.give(record)
            yield record
        yield from self._leaves.rest(self._path)

    def _begin(self, path: Sequence[int]) -> None:  # noqa: B027
        """A new use begins. path: what of the prefix is known, root first."""

    def _extended(self, records: Sequence[int], path: Sequence[int]) -> None:  # noqa: B027
        """The path of this use became longer; `records` are held, and counted in this use."""

    @abstractmethod
    def _used(self, records: Sequence[int], path: Sequence[int]) -> None:
        """Records, root first, were used (once each in one use); those that are not held are held from now on. path:
        what of the prefix is known, root first."""

    @abstractmethod
    def _next(self) -> int:
        """The head (`Leaves.head`) that goes next; 0 for none."""

    def _gone(self, record: int, evicted: bool) -> None:  # noqa: B027
        """A record is about to be held no longer. evicted: it was named as a victim before."""
