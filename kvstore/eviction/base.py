"""What an eviction policy is."""

from __future__ import annotations

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
