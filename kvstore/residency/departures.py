"""Which blocks left the store since it was opened, and why: what `KVStore.explain` says of a block that is gone."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from kvstore.core.explanation import Reason
from kvstore.core.record import key_tag
from kvstore.core.tokens import Tokens

# What is remembered: a few megabytes at most.
_MOST_BLOCKS = 16_384
_MOST_TOKENS = 1 << 20
_TOKEN_BYTES = 4


class BlockName(NamedTuple):
    """Which block it was.

    tokens: 4 bytes each, little-endian. tag: the first 8 bytes of its key (`key_tag`). after: of the key of the block
    before it, or of the digest of the namespace for a first block.
    """

    tokens: bytes
    tag: int
    after: int

    @classmethod
    def of(cls, key: bytes, parent_key: bytes, namespace: bytes, start: int, tokens: Tokens) -> BlockName:
        """namespace: its digest. start: position of the block's first token."""
        return cls(tokens.astype("<u4", copy=False).tobytes(), key_tag(key), after_tag(parent_key, namespace, start))


class _Departure(NamedTuple):
    """A block that left. Sorts by tokens. number: rises with every departure."""

    tokens: bytes
    tag: int
    after: int
    number: int
    reason: Reason


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
        self._left: OrderedDict[int, _Departure] = OrderedDict()  # by tag, the oldest first
        self._after: dict[int, list[_Departure]] = {}  # what followed a tag, sorted
        self._count = 0
        self._bytes = 0
        self._expected: OrderedDict[int, Reason] = OrderedDict()  # records known by number alone, the oldest first

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
                self._expected.popitem(last=False)

    def expects(self, record: int, reason: Reason | None = None) -> bool:
        """Whether `found` is wanted for the record, which left for this reason, or for any."""
        found = self._expected.get(record)
        return found is not None and reason in (None, found)

    def found(self, names: Iterable[tuple[int, BlockName]]) -> None:
        """Which blocks expected records were."""
        with self._lock:
            for record, name in names:
                reason = self._expected.pop(record, None)
                if reason is not None:
                    self._add(name, reason)

    def clear(self) -> None:
        """Forget everything, tokens and all."""
        with self._lock:
            self._left.clear()
            self._after.clear()
            self._expected.clear()
            self._bytes = 0

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
            place = bisect_left(followers, wanted, key=_tokens)
            near = followers[max(0, place - 1) : place + 2]
        best = max(near, key=lambda left: (_shared(left.tokens, wanted), left.number), default=None)
        return best.reason if best is not None and _shared(best.tokens, wanted) > known else None

    def _add(self, name: BlockName, reason: Reason) -> None:
        if name.tag in self._left:
            self._remove(name.tag)
        self._count += 1
        left = self._left[name.tag] = _Departure(*name, self._count, reason)
        followers = self._after.get(name.after)
        if followers is None:
            self._after[name.after] = [left]
        else:
            insort(followers, left)
        self._bytes += len(name.tokens)
        while len(self._left) > self._most_blocks or self._bytes > self._most_bytes:
            self._remove(next(iter(self._left)))

    def _remove(self, tag: int) -> None:
        left = self._left.pop(tag, None)
        if left is None:
            return
        self._bytes -= len(left.tokens)
        followers = self._after[left.after]
        del followers[bisect_left(followers, left)]
        if not followers:
            del self._after[left.after]


_tokens = attrgetter("tokens")


def _shared(a: bytes, b: bytes) -> int:
    """How many leading tokens two runs have in common."""
    shorter = min(len(a), len(b)) // _TOKEN_BYTES
    if a[:_TOKEN_BYTES] != b[:_TOKEN_BYTES]:
        return 0
    differ = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
    same = (differ & -differ).bit_length() - 1 if differ else 0
    return min(shorter, same // (8 * _TOKEN_BYTES)) if differ else shorter
