"""Which record a tier gives up when its budget is full. Pure: no I/O; the tier that owns a policy guards it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """Order of the records of one tier. Record ids are positive integers.

    A caller passes the ids of a path root first. Policies must name children before their parents, so that what
    stays stored is always reachable from the root.
    """

    def add(self, record_id: int) -> None:
        """The tier now holds the record; a record that is held already is used again."""

    def touch(self, path: Iterable[int]) -> None:
        """The records of one prefix, root first, were used; ids that the tier does not hold are ignored."""

    def discard(self, record_id: int) -> None:
        """The tier no longer holds the record."""

    def victims(self) -> Iterator[int]:
        """Records in the order in which to give them up. The caller stops where it has enough, and discards after."""


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
