"""ARC: what was used once and what was used again, in two queues by recency."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvstore.eviction.leaf_first import LeafFirst


class LeafFirstARC(LeafFirst):
    """ARC (Megiddo and Modha, FAST 2003) for prefixes: only leaf records leave.

    An `EvictionPolicy`; see `LeafFirst` for what one use is. Records that were used once stand in one queue, those that
    were used again in another, each by recency. Records that left are remembered for each queue; one that comes back
    moves the share of its queue up, and enters the second. Memory: that of `Leaves`, and at most one remembered number
    for each record held; about 500 bytes a record.

    Example:
        >>> policy = LeafFirstARC()
        >>> for path in ([1], [2], [1]):
        ...     policy.touch(path)
        ...     policy.add(path[0])
        >>> policy.touch([3])
        >>> list(policy.victims())
        [2, 1]
    """

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0
        self._once = 0  # records in the first queue
        self._target = 0.0  # and how many may be there
        self._left: dict[bool, OrderedDict[int, None]] = {False: OrderedDict(), True: OrderedDict()}

    def _used(self, records: Sequence[int], path: Sequence[int]) -> None:
        for record in reversed(records):
            known = record in self._leaves
            self._once -= known and self._leaves.queue(record) is False
            self._put(record, known or self._came_back(record))

    def _used_before(self, record: int, uses: int) -> None:
        self._once -= self._leaves.queue(record) is False
        self._put(record, True)

    def _put(self, record: int, again: bool) -> None:
        self._clock += 1
        self._once += not again
        self._leaves.place(record, again, (self._clock, 0))

    def _came_back(self, record: int) -> bool:
        once, again = self._left[False], self._left[True]
        if record in once:
            self._target = min(len(self), self._target + max(1, len(again) / len(once)))
            del once[record]
        elif record in again:
            self._target = max(0, self._target - max(1, len(once) / len(again)))
            del again[record]
        else:
            return False
        return True

    def _next(self) -> int:
        once, again = self._leaves.head(False), self._leaves.head(True)
        return once if once and (self._once > self._target or not again) else again

    def _gone(self, record: int, evicted: bool) -> None:
        again = self._leaves.queue(record) is True
        self._once -= not again
        if evicted:
            left = self._left[again]
            left[record] = None
            while len(left) > max(1, self._once if again else len(self) - self._once):
                left.popitem(last=False)
