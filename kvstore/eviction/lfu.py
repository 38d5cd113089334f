"""LFU: the record with the fewest uses goes first."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.eviction.leaf_first import LeafFirst


class LeafFirstLFU(LeafFirst):
    """The leaf record with the fewest uses first; among equal ones, the least recently used.

    An `EvictionPolicy`; see `LeafFirst` for what one use is. A record that leaves is forgotten with its count. Counts
    do not age: what was used often long ago stays long. Memory: that of `Leaves`, about 400 bytes a record.

    Example:
        >>> policy = LeafFirstLFU()
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

    def _used(self, records: Sequence[int], path: Sequence[int]) -> None:
        for record in reversed(records):
            self._clock += 1
            count = self._leaves.key(record)[0] if record in self._leaves else 0
            self._leaves.place(record, "", (count + 1, self._clock))

    def _used_before(self, record: int, uses: int) -> None:
        self._leaves.place(record, "", (uses, self._clock))

    def _next(self) -> int:
        return self._leaves.head("")
