"""When a reclaim has evicted enough: the arithmetic of making a segment free. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvstore.config import PAGE_BYTES
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.disk.overwrite import gaps
from kvstore.tiers.disk.segment import Extent, Space
from kvstore.tiers.disk.segments import Segments

# Live records may take this share of the segments; the rest is what makes recycling cheap.
_LIVE_SHARE = 0.9
# Less than this left in a segment is moved; while more is, one segment's worth is evicted...
_NEARLY_EMPTY = 0.1
# ...as long as this share of what may live still does.
_FLOOR = 0.75
# A segment is worth moving from when at most this share of it is live...
_WORTH_EMPTYING = 0.5
# ...or, so that pins do not cost everything else, after this many segments' worth were evicted in vain.
_MOST_EVICTED = 2
# Moving from a segment fuller than this frees too little to be worth it.
FULL = 0.98
# Records that are this large on average are written between others, too; smaller ones would make too many small writes,
# and too many of them would have to be looked at to find the spaces.
LARGE_RECORD = 64 << 10
# The least space that is written to. From here on a write costs hardly more than as a part of a larger one.
_LEAST_SPACE = 128 << 10


def live_limit(segments: int, segment_bytes: int) -> int:
    """Return the most bytes of records that may live in so many segments, of which one is the reserve.

    Example:
        >>> live_limit(11, 1004096)
        9000000
    """
    return int(max(1, segments - 1) * (segment_bytes - PAGE_BYTES) * _LIVE_SHARE)


def spaces_between(entries: Sequence[Entry], segment_bytes: int, largest: int) -> list[Space]:
    """Return where records of up to `largest` bytes can be written between those that live in a segment.

    Args:
        entries: what lives there, in the order in which it lies.

    Example:
        >>> spaces_between([], 1 << 20, 4096)
        [(4096, 1048576)]
    """
    live = [(entry.extent.offset, entry.extent.offset + entry.extent.nbytes) for entry in entries]
    least = max(_LEAST_SPACE, largest)
    return [(begin, end) for begin, end in gaps(live, PAGE_BYTES, segment_bytes) if end - begin >= least]


@dataclass
class Reclaim:
    """Live bytes, as space is reclaimed. For one thread.

    Large records are written between others: then it is enough that few enough bytes live. For small ones a segment has
    to be made free.

    Records used last at the same time mostly lie together. So it pays to evict a little more and find the segment
    nearly empty, rather than to move records that would have been the next to go.

    Attributes:
        segment: bytes that a segment holds.
        live, limit: live bytes of all segments, and the most that may be.
        left: live bytes by segment, without those being filled.
        fixed: segments that nothing can be moved from for now; each can only be emptied by eviction.
        can_move: whether there is a segment in reserve to move records into.
        lost: bytes evicted.
        last: segment of the last eviction.
        coming: bytes of large records that are to be written; None: a segment is to be made free.

    Example:
        >>> space = Reclaim(segment=8192, live=4096, limit=8192, left={1: 4096}, can_move=False)
        >>> space.enough()
        False
        >>> space.lose(Extent(segment=1, offset=4096, nbytes=4096))
        >>> space.enough()
        True
    """

    segment: int
    live: int
    limit: int
    left: dict[int, int]
    can_move: bool
    lost: int = 0
    last: int = 0
    fixed: frozenset[int] = frozenset()
    coming: int | None = None
    # (bytes left, segment) of all that something can be moved from, the least first; some are out of date.
    _order: list[tuple[int, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._order = []
        for number, nbytes in self.left.items():
            if self._counts(number, nbytes):
                self._order.append((nbytes, number))
        heapq.heapify(self._order)

    @classmethod
    def of(cls, segments: Segments, fixed: Collection[int] = (), coming: int | None = None) -> Reclaim:
        size = segments.segment_bytes - PAGE_BYTES
        return cls(
            segment=size,
            live=segments.live_bytes,
            limit=live_limit(segments.max_segments, segments.segment_bytes),
            left={} if coming is not None else {s.number: s.live for s in segments.settled()},
            # Without a segment in reserve nothing can be moved: then one must be emptied by eviction alone.
            can_move=segments.available() > 0,
            fixed=frozenset(fixed),
            coming=coming,
        )

    def lose(self, extent: Extent) -> None:
        """Note that the record at `extent` was evicted."""
        self.live -= extent.nbytes
        self.lost += extent.nbytes
        self.last = extent.segment
        if extent.segment in self.left:
            nbytes = self.left[extent.segment] = self.left[extent.segment] - extent.nbytes
            if self._counts(extent.segment, nbytes):
                heapq.heappush(self._order, (nbytes, extent.segment))

    def enough(self) -> bool:
        """Return whether there is room for what is coming, or a segment can now be made free at a fair price."""
        if self.coming is not None:
            return self.live + self.coming <= self.limit
        least = self._least()
        if self.live > self.limit:
            return False
        if not self.can_move:
            return least <= 0
        if least <= self.segment * _NEARLY_EMPTY:
            # While the evictions still hit this very segment, what is left in it goes next: then nothing is moved.
            return least <= 0 or self.left.get(self.last) != least
        if self.lost < self.segment and self.live > self.limit * _FLOOR:
            return False
        return least <= self.segment * _WORTH_EMPTYING or self.lost >= self.segment * _MOST_EVICTED

    def needed(self, largest: int) -> int:
        """Return how many records of up to `largest` bytes have to go at least before there is enough; 1 if that cannot
        be said.

        Example:
            >>> Reclaim(segment=8192, live=81920, limit=40960, left={1: 4096}, can_move=True).needed(8192)
            5
        """
        return max(1, (self.live + (self.coming or 0) - self.limit) // largest)

    def take_empty(self) -> bool:
        """Set an empty segment aside, so that `enough` is about the next one; return False if there is none."""
        if not self.left or self._least() > 0:
            return False
        del self.left[self._order[0][1]]
        self.lost = 0
        return True

    def _counts(self, number: int, nbytes: int) -> bool:
        return nbytes <= 0 or number not in self.fixed

    def _least(self) -> int:
        """Live bytes of the segment that costs least to empty."""
        while self._order and self.left.get(self._order[0][1]) != self._order[0][0]:
            heapq.heappop(self._order)
        if self._order:
            return self._order[0][0]
        return self.segment if self.left else 0
