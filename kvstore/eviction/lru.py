"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator


class LeafFirstLRU:
    """Least recently used first, and of one prefix the end before its beginning (touched deepest first)."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, record_id: int) -> None:
        self._order[record_id] = None
        self._order.move_to_end(record_id)

    def touch(self, path: Iterable[int]) -> None:
        for record_id in reversed(list(path)):
            if record_id in self._order:
                self._order.move_to_end(record_id)

    def discard(self, record_id: int) -> None:
        self._order.pop(record_id, None)

    def victims(self) -> Iterator[int]:
        return iter(self._order)
