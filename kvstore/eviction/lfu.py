"""Least frequently used first."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.eviction.leaf_first import LeafFirst


class LeafFirstLFU(LeafFirst):
    """The leaf with the fewest uses first, of equal ones the least recently used. Memory a record: that of `Leaves`.
    What is evicted is forgotten, its count too."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0

    def _used(self, records: Sequence[int], path: Sequence[int]) -> None:
        for record in reversed(records):
            self._clock += 1
            count = self._leaves.key(record)[0] if record in self._leaves else 0
            self._leaves.place(record, "", (count + 1, self._clock))

    def _next(self) -> int:
        return self._leaves.head("")
