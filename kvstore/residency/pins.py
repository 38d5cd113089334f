"""Which sequences are pinned, and which records that keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Pins:
    """Guarded by the lock of `Residency`; `is_pinned` and `is_kept` are single look-ups, which need no lock.

    path: the records of the prefix that ends with a record, root first, 0 where there is none; [] for an unknown one.
    """

    def __init__(self, path: Callable[[int], list[int]]) -> None:
        self._path = path
        self._pinned: set[int] = set()  # the last records of pinned sequences
        self._kept: set[int] = set()  # all records of those sequences
        self._holes = False  # a record of a pinned sequence is missing: what fills the hole is kept too

    def add(self, record: int) -> None:
        """Pins the sequence that ends with this record."""
        self._pinned.add(record)
        self._keep(record)

    def load(self, records: Iterable[int]) -> None:
        """Pins many, as when a store is opened."""
        for record in records:
            self.add(record)

    def remove(self, record: int) -> None:
        """The record is gone."""
        if record in self._pinned:
            self._pinned.discard(record)
            self._keep_all()
        elif record in self._kept:
            self._kept.discard(record)
            self._holes = True

    def arrived(self) -> None:
        """A record arrived: it may fill a hole in a pinned sequence."""
        if self._holes:
            self._keep_all()

    def is_pinned(self, record: int) -> bool:
        """Whether a pinned sequence ends with the record."""
        return record in self._pinned

    def is_kept(self, record: int) -> bool:
        """Whether the record, or one that continues it, is pinned."""
        return record in self._kept

    def snapshot(self) -> tuple[frozenset[int], frozenset[int]]:
        """(pinned records, kept records)."""
        return frozenset(self._pinned), frozenset(self._kept)

    def _keep(self, record: int) -> None:
        path = self._path(record)
        self._kept.update(r for r in path if r)
        self._holes |= 0 in path

    def _keep_all(self) -> None:
        paths = [self._path(record) for record in self._pinned]
        self._holes = any(0 in path for path in paths)
        # In one assignment: a reader without the lock finds the old set or the new one, never a part of it.
        self._kept = {record for path in paths for record in path if record}
