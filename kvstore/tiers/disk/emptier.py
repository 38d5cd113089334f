"""Which segment has the fewest live bytes, in time that does not grow with their number."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from kvstore.tiers.disk.segment import Segment

_SPARE_ROWS = 64


class Emptier:
    """Segments in which records died, the emptiest first. `Segments` guards it.

    Takes O(log n) for a death, and the same for each segment that is looked at. What changed since is told by the rows
    themselves: (live bytes, number) is out of date if the segment has other live bytes by now.

    Args:
        segments: all of them, by number.

    Example:
        >>> segments = {1: Segment(1, live=8192), 2: Segment(2, live=4096)}
        >>> emptier = Emptier(segments)
        >>> emptier.find(most=8192, usable=lambda segment: True).number
        2
        >>> segments[1].live = 0
        >>> emptier.died(segments[1])
        >>> emptier.find(most=8192, usable=lambda segment: segment.number != 2) is None
        True
    """

    def __init__(self, segments: Mapping[int, Segment]) -> None:
        self._segments = segments
        self._rows: list[tuple[int, int]] = []
        self._list()

    def died(self, segment: Segment) -> None:
        """Note that a record of the segment died."""
        heapq.heappush(self._rows, (segment.live, segment.number))
        if len(self._rows) > 4 * len(self._segments) + _SPARE_ROWS:
            self._list()

    def find(self, most: int, usable: Callable[[Segment], bool]) -> Segment | None:
        """Return the emptiest of the segments with live records, of at most `most` bytes, that is `usable` and to whose
        spaces can be written (`Segment.is_closed`); None if there is none."""
        kept, found = list[tuple[int, int]](), None
        while found is None and self._rows and self._rows[0][0] <= most:
            row = heapq.heappop(self._rows)
            segment = self._segments.get(row[1])
            if segment is None or segment.live != row[0] or not segment.live or segment.is_closed or row in kept:
                continue  # it is listed again when something more dies there
            kept.append(row)
            if usable(segment):
                found = segment
        for row in kept:
            heapq.heappush(self._rows, row)
        return found

    def _list(self) -> None:
        self._rows = [(segment.live, segment.number) for segment in self._segments.values() if segment.live > 0]
        heapq.heapify(self._rows)
