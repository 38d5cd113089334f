"""When records reach the end of their life."""

from __future__ import annotations

import heapq
import time


class Expiry:
    """Ends of life by record, in unix seconds.

    Guarded by the lock of `Residency`; `of` is a single look-up, which needs no lock.

    Example:
        >>> expiry = Expiry()
        >>> expiry.set(7, 1.0)
        >>> expiry.is_over(7), expiry.due()
        (True, [7])
    """

    def __init__(self) -> None:
        self._ends: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []  # also those that were changed since: `_ends` decides

    def set(self, record: int, end: float) -> None:
        """end: 0 for never."""
        if end:
            self._ends[record] = end
            heapq.heappush(self._heap, (end, record))
        else:
            self._ends.pop(record, None)

    def remove(self, record: int) -> None:
        """The record is gone."""
        self._ends.pop(record, None)

    def of(self, record: int) -> float:
        """0 for never."""
        return self._ends.get(record, 0.0)

    def is_over(self, record: int) -> bool:
        """Whether the record is past its time."""
        end = self.of(record)
        return end != 0.0 and end <= time.time()

    def is_due(self) -> bool:
        """Whether the time of a record may have come."""
        return bool(self._heap) and self._heap[0][0] <= time.time()

    def due(self) -> list[int]:
        """The records whose time has come; each is named once."""
        found, now = [], time.time()
        while self._heap and self._heap[0][0] <= now:
            end, record = heapq.heappop(self._heap)
            if self._ends.get(record) == end:
                found.append(record)
        return list(dict.fromkeys(found))

    def snapshot(self) -> tuple[dict[int, float], frozenset[tuple[float, int]]]:
        """(ends of life by record, what waits for its time)."""
        return dict(self._ends), frozenset(self._heap)
