"""LRU: the least recently used record goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator


class LeafFirstLRU:
    """Least recently used first; the end of a prefix goes before its beginning.

    An `EvictionPolicy`. A use of a prefix moves its records behind all others, the deepest first. Every call takes O(1)
    for each record. Memory: one entry of a dict for each record, about 110 bytes.

    Example:
        >>> policy = LeafFirstLRU()
        >>> for record in (1, 2, 3):
        ...     policy.add(record)
        >>> policy.touch([1, 2])
        >>> list(policy.victims())
        [3, 2, 1]
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, record_id: int, parent: int = 0, nbytes: int = 0, uses: int = 1) -> None:
        """Hold a record as the last used one. What else is said of it makes no difference here."""
        self._order[record_id] = None
        self._order.move_to_end(record_id)

    def touch(self, path: Iterable[int]) -> None:
        """Count a use of one prefix, given root first."""
        for record_id in reversed(list(path)):
            if record_id in self._order:
                self._order.move_to_end(record_id)

    def discard(self, record_id: int) -> None:
        """Hold a record no longer."""
        self._order.pop(record_id, None)

    def victims(self) -> Iterator[int]:
        """Name all held records, the least recently used first."""
        return iter(self._order)
