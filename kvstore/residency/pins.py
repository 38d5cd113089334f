"""Which sequences are pinned, which records that keeps, and how many bytes those take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    """A record of a pinned sequence, which may be gone meanwhile; then it holds the place in the sequence.

    above: the record before it, 0 for none. below: those that continue it and are in this tree, too.
    """

    above: int
    below: set[int] = field(default_factory=set)


class Pins:
    """The last records of pinned sequences, and all records that those keep, as a tree.

    Pinning takes time in proportion to the length of the sequence, and ending a pin to what is kept no more.

    Guarded by the lock of `Residency`; `is_pinned` and `is_kept` are single look-ups, which need no lock: a record that
    goes on being kept is never missing, not even for a moment.

    Args:
        path: gives the records of the prefix that ends with a record, root first, 0 for a missing one; [] if the record
            is unknown.
        size: gives the bytes that a record takes.

    Example:
        >>> pins = Pins({2: [1, 2]}.__getitem__, size=lambda record: 4096)
        >>> pins.add(2)
        >>> pins.is_pinned(1), pins.is_kept(1), pins.nbytes
        (False, True, 8192)
        >>> pins.end(2)
        [2, 1]
    """

    def __init__(self, path: Callable[[int], list[int]], size: Callable[[int], int]) -> None:
        self._path = path
        self._size = size
        self._pinned: set[int] = set()  # the last records of pinned sequences
        self._kept: dict[int, int] = {}  # all records of those sequences, and the bytes of each
        self._nodes: dict[int, _Node] = {}  # the same records, and those that are missing in a sequence
        self._holed: set[int] = set()  # pinned sequences with a missing record: what fills the hole is kept too
        self._nbytes = 0

    def add(self, record: int) -> None:
        """Pin the sequence that ends with this record."""
        self._pinned.add(record)
        self._keep(record, self._size)

    def load(self, records: Iterable[int], sizes: Mapping[int, int]) -> None:
        """Pin many sequences, as when a store is opened. sizes: bytes by record."""
        for record in records:
            self._pinned.add(record)
            self._keep(record, lambda kept: sizes.get(kept, 0))

    def end(self, record: int) -> list[int]:
        """Pin a sequence no longer; return the records that are kept no more."""
        self._pinned.discard(record)
        self._holed.discard(record)
        return self._release(record)

    def remove(self, record: int) -> list[int]:
        """Note that the record is gone; return those that are kept no more, without it."""
        self._nbytes -= self._kept.pop(record, 0)
        freed = self.end(record) if record in self._pinned else []
        if record in self._nodes:
            self._holed.update(self._pinned_below(record))
        return freed

    def arrived(self) -> None:
        """Note that a record arrived; it may fill a hole in a pinned sequence."""
        for record in list(self._holed):
            self._keep(record, self._size)

    def resize(self, record: int) -> None:
        """Note that a record takes other bytes than before, as when it was written. Does nothing if it is not kept."""
        if record in self._kept:
            size = self._size(record)
            self._nbytes += size - self._kept[record]
            self._kept[record] = size

    def is_pinned(self, record: int) -> bool:
        """Return whether a pinned sequence ends with the record."""
        return record in self._pinned

    def is_kept(self, record: int) -> bool:
        """Return whether the record, or one that continues it, is pinned."""
        return record in self._kept

    @property
    def nbytes(self) -> int:
        """Bytes that the kept records take."""
        return self._nbytes

    def __len__(self) -> int:
        """How many sequences are pinned."""
        return len(self._pinned)

    def snapshot(self) -> tuple[frozenset[int], dict[int, int]]:
        """Return copies of (pinned records, bytes of every kept record)."""
        return frozenset(self._pinned), dict(self._kept)

    def _keep(self, record: int, size: Callable[[int], int]) -> None:
        path = self._path(record)
        (self._holed.add if 0 in path else self._holed.discard)(record)
        above = 0
        for each in path:
            if each:
                self._link(each, above)
                if each not in self._kept:
                    self._kept[each] = size(each)
                    self._nbytes += self._kept[each]
                above = each

    def _link(self, record: int, above: int) -> None:
        """Makes `above` the record before this one."""
        node = self._nodes.get(record)
        if node is not None and node.above == above:
            return
        before = node.above if node is not None else 0
        if node is None:
            self._nodes[record] = _Node(above)
        else:
            node.above = above  # a hole was filled, or made
        if above:
            self._nodes[above].below.add(record)
        if before:
            self._nodes[before].below.remove(record)
            self._release(before)

    def _release(self, record: int) -> list[int]:
        """Forgets records from this one up, as far as nothing needs them; returns those that were kept until now."""
        freed = []
        while (node := self._nodes.get(record)) is not None and not node.below and record not in self._pinned:
            del self._nodes[record]
            if record in self._kept:
                self._nbytes -= self._kept.pop(record)
                freed.append(record)
            if node.above:
                self._nodes[node.above].below.remove(record)
            record = node.above
        return freed

    def _pinned_below(self, record: int) -> list[int]:
        found, todo = [], [record]
        while todo:
            each = todo.pop()
            if each in self._pinned:
                found.append(each)
            todo.extend(self._nodes[each].below)
        return found
