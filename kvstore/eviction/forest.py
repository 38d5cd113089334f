"""The held records as a forest of prefixes. The leaves, records that no held record continues, may be evicted."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator

Key = tuple[float, float]


class Leaves:
    """Held records, the parent of each, and queues of the leaves. Not thread-safe.

    Each held record has a place: a queue and a key. The head of a queue is its leaf with the least key. A record can be
    a head only when its children have left, whatever its key is. With `both_ends` a queue has a tail too: its leaf with
    the greatest key.

    A policy names victims ahead of time. `give` marks a head as named: it is still held, but its parent can be the next
    head. `restore` takes all marks back.

    Every operation takes O(log n), amortised. Memory for each record: its place, its parent, its parent's number of
    children, and at most two entries in a queue (four with `both_ends`).

    Args:
        both_ends: queues have tails.

    Example:
        >>> leaves = Leaves()
        >>> for record, parent in [(1, 0), (2, 1), (3, 0)]:
        ...     leaves.place(record, "queue", (record, 0))
        ...     leaves.link(record, parent)
        >>> leaves.head("queue")  # 1 has a child
        2
        >>> leaves.give(2)
        >>> leaves.head("queue")
        1
    """

    def __init__(self, both_ends: bool = False) -> None:
        self._both_ends = both_ends
        self._place: dict[int, tuple[Hashable, Key]] = {}
        self._parent: dict[int, int] = {}
        self._children: dict[int, int] = {}  # number of held children of each record, held or not
        self._heaps: dict[Hashable, list[tuple[Key, int]]] = {}
        self._tails: dict[Hashable, list[tuple[Key, int]]] = {}  # the same with negated keys
        self._entries = 0
        self._aside: list[int] = []
        self._given: set[int] = set()
        self._lost: dict[int, int] = {}  # how many of its children are marked as named
        self.in_use: frozenset[int] | set[int] = frozenset()  # these are never heads

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, record: int) -> bool:
        return record in self._place

    def __iter__(self) -> Iterator[int]:
        return iter(self._place)

    def queue(self, record: int) -> Hashable:
        """Return the queue of a held record."""
        return self._place[record][0]

    def key(self, record: int) -> Key:
        """Return the key of a held record."""
        return self._place[record][1]

    def queues(self) -> list[Hashable]:
        """Return the queues that may have a head."""
        return [queue for queue, heap in self._heaps.items() if heap]

    def place(self, record: int, queue: Hashable, key: Key) -> None:
        """Hold a record at this place, or move it there."""
        if self._place.get(record) != (queue, key):
            self._place[record] = (queue, key)
            if self._is_bare(record):  # children that are named count as gone: a policy may move their parent
                self._push(record)

    def link(self, record: int, parent: int) -> None:
        """Say which record comes right before a held one; 0 for none. The parent need not be held."""
        before = self._parent.get(record, 0)
        if before == parent:
            return
        self._unlink(record, before)
        if parent:
            self._parent[record] = parent
            self._children[parent] = self._children.get(parent, 0) + 1
            if record in self._given:
                self._lost[parent] = self._lost.get(parent, 0) + 1

    def drop(self, record: int) -> None:
        """Hold a held record no longer. Its children stay."""
        del self._place[record]
        self._unlink(record, self._parent.get(record, 0))
        self._given.discard(record)

    def is_given(self, record: int) -> bool:
        """Whether the record was marked as named since `restore`."""
        return record in self._given

    def head(self, queue: Hashable) -> int:
        """Return the leaf with the least key of a queue, neither in use nor marked as named; 0 for none."""
        return self._first(self._heaps, queue, 1)

    def tail(self, queue: Hashable) -> int:
        """Return the same for the greatest key; needs `both_ends`."""
        return self._first(self._tails, queue, -1)

    def _first(self, heaps: dict[Hashable, list[tuple[Key, int]]], queue: Hashable, sign: int) -> int:
        heap = heaps.get(queue, [])
        while heap:
            (a, b), record = heap[0]
            if (
                self._place.get(record) == (queue, (sign * a, sign * b))
                and record not in self._given
                and self._is_bare(record)
            ):
                if record not in self.in_use:
                    return record
                self._aside.append(record)
            heapq.heappop(heap)
            self._entries -= 1
        return 0

    def is_head(self, record: int) -> bool:
        """Whether a record may be the next head of its queue: a held leaf, neither in use nor marked as named."""
        return (
            record in self._place and record not in self._given and record not in self.in_use and self._is_bare(record)
        )

    def give(self, record: int) -> None:
        """Mark a head as named; its parent may be the next head."""
        self._given.add(record)
        parent = self._parent.get(record, 0)
        if parent:
            self._lost[parent] = self._lost.get(parent, 0) + 1
            if parent in self._place and self._is_bare(parent):
                self._push(parent)

    def rest(self, path: Iterable[int]) -> Iterator[int]:
        """Name and mark what is left when no queue has a head: the path in use, its end first.

        Args:
            path: the path in use, root first.
        """
        for record in reversed(list(path)):
            if record in self._place and record not in self._given:
                self.give(record)
                yield record

    def restore(self) -> None:
        """Take all marks back: what was named and not dropped is held as before."""
        again = [*self._aside, *self._given]
        self._aside, self._given, self._lost = [], set(), {}
        for record in again:
            if record in self._place and record not in self._children:
                self._push(record)

    def _is_bare(self, record: int) -> bool:
        return self._children.get(record, 0) <= self._lost.get(record, 0)

    def _unlink(self, record: int, parent: int) -> None:
        if not parent:
            return
        del self._parent[record]
        if record in self._given:
            self._lost[parent] -= 1
        if self._children[parent] > 1:
            self._children[parent] -= 1
            return
        del self._children[parent]
        if parent in self._place:
            self._push(parent)

    def _push(self, record: int) -> None:
        queue, key = self._place[record]
        heapq.heappush(self._heaps.setdefault(queue, []), (key, record))
        self._entries += 1
        if self._both_ends:
            heapq.heappush(self._tails.setdefault(queue, []), ((-key[0], -key[1]), record))
            self._entries += 1
        if self._entries > (4 if self._both_ends else 2) * len(self._place) + 64:
            self._rebuild()

    def _rebuild(self) -> None:
        """Leave out the entries of records that moved, left or have children."""
        self._heaps, self._tails = {}, {}
        self._entries = 0
        aside = set(self._aside)
        for record, (queue, key) in self._place.items():
            if record not in self._given and record not in aside and self._is_bare(record):
                self._heaps.setdefault(queue, []).append((key, record))
                self._entries += 1
                if self._both_ends:
                    self._tails.setdefault(queue, []).append(((-key[0], -key[1]), record))
                    self._entries += 1
        for heap in [*self._heaps.values(), *self._tails.values()]:
            heapq.heapify(heap)
