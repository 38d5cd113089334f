"""Blocks that were taken and are not written yet, by the numbers of their records."""

from __future__ import annotations

import heapq

from kvstore.residency.block import Block
from kvstore.trie.index import NO_LIMIT

_GONE = 64  # so many more numbers may be kept than there are blocks twice over


class Pending(dict[int, Block]):
    """A dict that knows its lowest key: a full disk asks for that with each record that it gives up.

    Guarded by whoever owns it. Blocks come by `pending[record] = block` alone.

    Example:
        >>> pending = Pending()
        >>> pending.first() == NO_LIMIT
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: list[int] = []  # a heap of all keys, and of some that left

    def __setitem__(self, record: int, block: Block) -> None:
        if len(self._numbers) > 2 * len(self) + _GONE:
            self._numbers = sorted(self)
        heapq.heappush(self._numbers, record)  # first: a number without a block does no harm
        super().__setitem__(record, block)

    def first(self) -> int:
        """Return the lowest number of a block that waits; NO_LIMIT if there is none."""
        while self._numbers and self._numbers[0] not in self:
            heapq.heappop(self._numbers)
        return self._numbers[0] if self._numbers else NO_LIMIT
