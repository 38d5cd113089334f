"""Which blocks left the store since it was opened, and why: what `KVStore.explain` says of a block that is gone."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.core.explanation import Reason
from kvstore.core.record import key_tag
from kvstore.core.tokens import Tokens

# What is remembered: a few megabytes at most.
_MOST_BLOCKS = 16_384
_MOST_TOKENS = 1 << 20
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class BlockName:
    """Which block it was.

    tag: the first 8 bytes of its key (`key_tag`). after: of the key of the block before it, or of the digest of the
    namespace for a first block. tokens: 4 bytes each, little-endian.
    """

    tag: int
    after: int
    tokens: bytes

    @classmethod
    def of(cls, key: bytes, parent_key: bytes, namespace: bytes, start: int, tokens: Tokens) -> BlockName:
        """namespace: its digest. start: position of the block's first token."""
        return cls(key_tag(key), after_tag(parent_key, namespace, start), tokens.astype("<u4", copy=False).tobytes())


def after_tag(parent_key: bytes, namespace: bytes, start: int) -> int:
    """The tag by which a block knows what it follows. The catalog has no key before the first block of a namespace:
    the namespace's digest stands for it."""
    return key_tag(parent_key if start else namespace)


class Departures:
    """A bounded log: the oldest entries are forgotten first, and all of it with the process.

    Thread-safe: `_lock` guards everything, and nothing is called while it is held.
    """

    def __init__(self, most_blocks: int = _MOST_BLOCKS, most_tokens: int = _MOST_TOKENS) -> None:
        self._most_blocks = most_blocks
        self._most_bytes = most_tokens * _TOKEN_BYTES
        self._lock = threading.Lock()
        self._left: dict[int, tuple[int, BlockName, Reason]] = {}  # by tag: a rising number; the oldest first
        self._after: dict[int, list[tuple[bytes, int]]] = {}  # what followed a tag: tokens and tag, sorted
        self._count = 0
        self._bytes = 0
        self._expected: dict[int, Reason] = {}  # records that are known by number alone, the oldest first

    def __len__(self) -> int:
        return len(self._left)

    def add(self, name: BlockName, reason: Reason) -> None:
        """A block left."""
        with self._lock:
            self._add(name, reason)

    def expect(self, record: int, reason: Reason) -> None:
        """A record left of which only the catalog knows which block it is: `found` follows when it was asked."""
        with self._lock:
            self._expected[record] = reason
            while len(self._expected) > self._most_blocks:
                del self._expected[next(iter(self._expected))]

    def expects(self, record: int) -> bool:
        """Whether `found` is wanted for the record."""
        return record in self._expected

    def found(self, record: int, name: BlockName) -> None:
        """Which block an expected record was."""
        with self._lock:
            reason = self._expected.pop(record, None)
            if reason is not None:
                self._add(name, reason)

    def arrived(self, keys: Iterable[bytes]) -> None:
        """The blocks with these keys are stored again."""
        if self._left:
            with self._lock:
                for key in keys:
                    self._remove(key_tag(key))

    def why(self, parent_key: bytes, namespace: bytes, start: int, tokens: Tokens, known: int = 0) -> Reason | None:
        """Why the block `tokens` is not stored beyond its first `known` tokens: the reason of the block that shared
        most tokens with it, and more than those; None where none is remembered.

        parent_key: key of the block before. namespace: its digest. start: position of the block's first token.
        """
        after = after_tag(parent_key, namespace, start)
        if after not in self._after:
            return None
        wanted = tokens.astype("<u4", copy=False).tobytes()
        with self._lock:
            followers = self._after.get(after, [])
            # Sorted neighbours have most in common with it: those before and behind its place.
            place = bisect_left(followers, (wanted,))
            near = [self._left[tag] for _, tag in followers[max(0, place - 1) : place + 2]]
        ranked = [(_shared(name.tokens, wanted), number, reason) for number, name, reason in near]
        shared, _, reason = max(ranked, key=lambda row: row[:2], default=(0, 0, Reason.NEVER_PUT))
        return reason if shared > known else None

    def _add(self, name: BlockName, reason: Reason) -> None:
        self._remove(name.tag)
        self._count += 1
        self._left[name.tag] = self._count, name, reason
        insort(self._after.setdefault(name.after, []), (name.tokens, name.tag))
        self._bytes += len(name.tokens)
        while len(self._left) > self._most_blocks or self._bytes > self._most_bytes:
            self._remove(next(iter(self._left)))

    def _remove(self, tag: int) -> None:
        left = self._left.pop(tag, None)
        if left is None:
            return
        _, name, _ = left
        self._bytes -= len(name.tokens)
        followers = self._after[name.after]
        del followers[bisect_left(followers, (name.tokens, tag))]
        if not followers:
            del self._after[name.after]


def _shared(a: bytes, b: bytes) -> int:
    """How many leading tokens two runs have in common."""
    shorter = min(len(a), len(b))
    differ = int.from_bytes(a[:shorter], "little") ^ int.from_bytes(b[:shorter], "little")
    same_bytes = ((differ & -differ).bit_length() - 1) // 8 if differ else shorter
    return same_bytes // _TOKEN_BYTES
