"""S3-FIFO: two queues in order of arrival, and the numbers of records that left the first one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvstore.eviction.leaf_first import LeafFirst

SMALL = 0.1  # share of the records that the small queue may have; this and the next two are the paper's
MOST_USES = 3
PROMOTED = 2  # uses in the small queue that bring a record to the main queue


class LeafFirstS3FIFO(LeafFirst):
    """S3-FIFO (Yang et al., SOSP 2023) for prefixes: only leaf records leave, and each queue is in order of arrival.

    An `EvictionPolicy`; see `LeafFirst` for what one use is. There are two queues and a memory of names:

    - A new record enters the small queue. Of the records that enter in one use, the deepest stands first.
    - The first leaf of the small queue moves to the main queue if it was used `promoted` times since it entered.
      Otherwise it leaves, and its number is remembered. If it comes back, it enters the main queue at once.
    - The first leaf of the main queue leaves if it was not used. Otherwise it goes to the end of that queue, and one of
      its uses is taken off.

    So a scan of records that never come back passes through the small queue and displaces nothing else. Memory: that of
    `Leaves`, a count of uses, and at most one remembered number for each record held; about 500 bytes a record.

    Args:
        promoted: uses in the small queue that bring a record to the main queue.

    Example:
        >>> policy = LeafFirstS3FIFO()
        >>> for path in ([1], [2], [1], [2], [1]):  # the second use of 1 promotes it
        ...     policy.touch(path)
        ...     policy.add(path[0])
        >>> policy.touch([3])
        >>> list(policy.victims())
        [2, 1]
    """

    def __init__(self, promoted: int = PROMOTED) -> None:
        super().__init__()
        self._promoted = promoted
        self._clock = 0
        self._uses: dict[int, int] = {}
        self._in_small = 0
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def _used(self, records: Sequence[int], path: Sequence[int]) -> None:
        for record in reversed(records):
            if record in self._leaves:
                self._uses[record] = min(MOST_USES, self._uses[record] + 1)
            else:
                self._enter(record)

    def _used_before(self, record: int, uses: int) -> None:
        self._uses[record] = min(MOST_USES, uses - 1)

    def _enter(self, record: int) -> None:
        main = record in self._ghosts
        self._ghosts.pop(record, None)
        self._in_small += not main
        self._uses[record] = 0
        self._queue(record, main)

    def _queue(self, record: int, main: bool) -> None:
        self._clock += 1
        self._leaves.place(record, main, (self._clock, 0))

    def _next(self) -> int:
        while True:
            small, main = self._leaves.head(False), self._leaves.head(True)
            if small and (self._in_small > SMALL * len(self) or not main):
                if self._uses[small] < self._promoted:
                    return small
                self._in_small -= 1
                self._uses[small] = 0
                self._queue(small, True)
            elif main:
                if not self._uses[main]:
                    return main
                self._uses[main] -= 1
                self._queue(main, True)
            else:
                return 0

    def _gone(self, record: int, evicted: bool) -> None:
        del self._uses[record]
        if self._leaves.queue(record) is True:
            return
        self._in_small -= 1
        if evicted:
            self._ghosts[record] = None
            while len(self._ghosts) > len(self):
                self._ghosts.popitem(last=False)
