"""Which sequences are pinned, and which records that keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Pins:
    """The last records of pinned sequences, and all records that those keep.

    Guarded by the lock of `Residency`; `is_pinned` and `is_kept` are single look-ups, which need no lock.

    Args:
        path: gives the records of the prefix that ends with a record, root first, 0 for a missing one; [] if the record
            is unknown.

    Example:
        >>> pins = Pins({2: [1, 2]}.__getitem__)
        >>> pins.add(2)
        >>> pins.is_pinned(1), pins.is_kept(1)
        (False, True)
    """

    def __init__(self, path: Callable[[int], list[int]]) -> None:
        self._path = path
        self._pinned: set[int] = set()  # the last records of pinned sequences
        self._kept: set[int] = set()  # all records of those sequences
        self._holes = False  # a record of a pinned sequence is missing: what fills the hole is kept too

    def add(self, record: int) -> None:
        """Pin the sequence that ends with this record."""
        self._pinned.add(record)
        self._keep(record)

    def load(self, records: Iterable[int]) -> None:
        """Pin many sequences, as when a store is opened."""
        for record in records:
            self.add(record)

    def remove(self, record: int) -> None:
        """Note that the record is gone."""
        if record in self._pinned:
            self._pinned.discard(record)
            self._keep_all()
        elif record in self._kept:
            self._kept.discard(record)
            self._holes = True

    def arrived(self) -> None:
        """Note that a record arrived; it may fill a hole in a pinned sequence."""
        if self._holes:
            self._keep_all()

    def is_pinned(self, record: int) -> bool:
        """Return whether a pinned sequence ends with the record."""
        return record in self._pinned

    def is_kept(self, record: int) -> bool:
        """Return whether the record, or one that continues it, is pinned."""
        return record in self._kept

    def snapshot(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return copies of (pinned records, kept records)."""
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
