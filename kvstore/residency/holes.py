"""Holes: records that left the middle of their sequences, as the index knows them and the catalog must.

What is behind a hole is stored as before: others are coded against it, and a put of the missing block makes all of it
findable again. The index (trie) says which holes there are. Its own memory is gone with the process, so the catalog
keeps an entry of each; a store that is opened again could not place what is behind it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from kvstore.core.guard import Guard
from kvstore.core.record import key_tag
from kvstore.core.tokens import Tokens
from kvstore.residency.block import Block
from kvstore.residency.departures import BlockName, after_tag
from kvstore.tiers.disk.entry import FLAG_HOLE, Entry
from kvstore.tiers.disk.segment import Extent
from kvstore.trie import TrieIndex


@dataclass(frozen=True)
class LostBlock:
    """A block that is not on disk, and may never have been: what a hole in its place is made of. Immutable.

    Attributes:
        record, parent, namespace, start, tokens, bits: as of `Block`.
        tag, parent_tag: as of `Entry`.
        after: as of `BlockName`.
    """

    record: int
    parent: int
    namespace: bytes
    start: int
    tokens: Tokens
    bits: float
    tag: int
    parent_tag: int
    after: int

    @classmethod
    def of(cls, block: Block) -> LostBlock:
        """Return what is to be remembered of a block that could not be written."""
        return cls(
            block.record,
            block.parent,
            block.namespace,
            block.start,
            block.tokens,
            block.bits,
            tag=key_tag(block.key),
            parent_tag=key_tag(block.parent_key) if block.start else 0,
            after=after_tag(block.parent_key, block.namespace, block.start),
        )

    @property
    def name(self) -> BlockName:
        """Which block it is, for the log of what left."""
        return BlockName(self.tokens.astype("<u4", copy=False).tobytes(), self.tag, self.after)

    def hole(self, namespace: int) -> Entry:
        """Return the catalog's entry of the hole. namespace: its number."""
        return Entry(
            self.record,
            self.parent,
            self.tag,
            self.parent_tag,
            Extent(0, 0, 0),
            self.start,
            namespace,
            codec=0,
            tokens=self.tokens,
            bits=self.bits,
            flags=FLAG_HOLE,
        )


class Holes:
    """Which holes the catalog must have; see `HoleKeeper`. Thread-safe.

    `_lock`, that of residency, guards `_due` and `_released`. The hole of a record on disk follows from its entry when
    that is removed. Blocks that never came to the disk are in `_due` until the catalog has their holes.

    Args:
        index: says which holes there are.
        lock: of residency.
        block_tokens: only blocks of so many tokens leave holes; nothing continues a shorter one.
        waiting_to_go: says what stays on disk until blocks that take its place are written, for those that a commit
            does not contain.

    Example:
        >>> from kvstore.core.guard import RESIDENCY
        >>> Holes(TrieIndex(64), Guard(RESIDENCY), 64, lambda coming: set()).kept([], [], {})
        []
    """

    def __init__(
        self, index: TrieIndex, lock: Guard, block_tokens: int, waiting_to_go: Callable[[Container[int]], set[int]]
    ) -> None:
        self._index = index
        self._lock = lock
        self._block_tokens = block_tokens
        self._waiting_to_go = waiting_to_go
        self._due: dict[int, LostBlock] = {}
        self._released: list[int] = []

    @property
    def due(self) -> frozenset[int]:
        """Records whose holes the catalog does not have yet, if they leave any."""
        with self._lock:
            return frozenset(self._due)

    @property
    def released(self) -> frozenset[int]:
        """Holes that nothing needs any more, and that the catalog may have."""
        with self._lock:
            self._released += self._index.take_released().tolist()
            return frozenset(self._released)

    def note(self, block: LostBlock) -> None:
        """A block is not on disk, while others continue it that may be there. The caller holds the lock."""
        self._lock.check_held()
        if len(block.tokens) == self._block_tokens:
            self._due[block.record] = block

    def release(self, record: int) -> None:
        """The record left, and the catalog may have a hole of it; whether that stays, the index says. The caller holds
        the lock."""
        self._lock.check_held()
        self._released.append(record)

    def take_released(self) -> list[int]:
        """See `HoleKeeper.take_released`."""
        with self._lock:
            released, self._released = [*self._released, *self._index.take_released().tolist()], []
            return released

    def give_back(self, released: Sequence[int]) -> None:
        """See `HoleKeeper.give_back`."""
        with self._lock:
            self._released += released

    def kept(self, leaving: Sequence[Entry], coming: Container[int], namespaces: Mapping[bytes, int]) -> list[Entry]:
        """See `HoleKeeper.kept`."""
        with self._lock:
            # A hole that is being filled is one until the block that fills it is on disk.
            waiting = self._waiting_to_go(coming)
            found = [
                entry if entry.is_hole else entry.as_hole()
                for entry in leaving
                if self._index.is_hole(entry.record)
                or (entry.record in waiting and len(entry.tokens) == self._block_tokens)
            ]
            known = {entry.record for entry in found}
            for record, block in list(self._due.items()):
                if record in known or not self._is_needed(record):
                    del self._due[record]
                elif block.namespace in namespaces:  # else nothing of it is on disk
                    found.append(block.hole(namespaces[block.namespace]))
            return found

    def written(self, holes: Sequence[Entry]) -> None:
        """See `HoleKeeper.written`."""
        with self._lock:
            for hole in holes:
                self._due.pop(hole.record, None)

    def _is_needed(self, record: int) -> bool:
        """Whether something continues the block: it left a hole, or is in memory alone."""
        return self._index.is_hole(record) or (record in self._index and self._index.leaf(record) is None)
