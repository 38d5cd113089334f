"""The contract of an eviction policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """The order in which one tier gives up its records.

    Records are named by their numbers, which are positive. A policy names a record only after all held records that
    continue it, as far as it knows them. So a record that stays can always be reached from the root of its prefix.

    Not thread-safe: whoever owns a policy calls it under one lock. A policy changes only itself, and nothing of it is
    durable.

    Example:
        >>> from kvstore.eviction import POLICIES
        >>> policy = POLICIES["lfu"]()
        >>> for record in (1, 2):
        ...     policy.add(record)
        >>> for path in ([1], [2], [1]):
        ...     policy.touch(path)
        >>> next(policy.victims())
        2
    """

    def add(self, record_id: int, parent: int = 0, nbytes: int = 0, uses: int = 1) -> None:
        """Hold a record. If it is held already, it is used again.

        Args:
            record_id: the record's number, > 0.
            parent: the record before it in its prefix, if the caller knows it; 0 for none or unknown. A later `touch`
                tells it too.
            nbytes: what it takes in the tier; 0 for unknown.
            uses: how often it was used so far, this time among them; of a record that is held already it is not asked.
        """

    def touch(self, path: Iterable[int]) -> None:
        """Count a use of one prefix.

        Args:
            path: the records of the prefix, root first. Records that are not held are not taken in; 0 stands for a
                missing one.
        """

    def discard(self, record_id: int) -> None:
        """Hold a record no longer. Does nothing if it is not held."""

    def victims(self) -> Iterator[int]:
        """Name all held records, the first to give up first.

        The caller takes as many as it needs, and discards those that go only after it has stopped iterating. A record
        that was named and not discarded is still held.
        """
