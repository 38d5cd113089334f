"""S3-FIFO: three queues, first in first out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvstore.eviction.leaf_first import LeafFirst

SMALL = 0.1  # share of the records that the small queue may have; this and the next two are the paper's
MOST_USES = 3
PROMOTED = 2  # uses in the small queue that bring a record to the main queue


class LeafFirstS3FIFO(LeafFirst):
    """S3-FIFO (Yang et al., SOSP 2023) for prefixes: the head of a queue is its oldest leaf.

    New records enter the small queue. What reaches its head with `PROMOTED` uses since goes to the main queue, the
    rest goes, and is remembered: when it comes back it enters the main queue at once. The head of the main queue goes
    if it was not used, else it is queued again and one use is taken off. Of the records that enter in one use the
    deepest stands first. Memory a record: that of `Leaves`, its uses, and one remembered id for each record held.
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
