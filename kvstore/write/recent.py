"""Which blocks on disk are exact because they are recent, where the disk's codec loses something."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock

from kvstore.codecs import Codec, codec_by_name
from kvstore.residency.block import Block
from kvstore.trie import Match

RECENT_CODEC = codec_by_name("entropy")
"""What they are coded with: exact, needs no profile, and a record names it, so that opening finds them."""


class RecentBlocks:
    """The blocks that stay exact until their sequence has gone on for so many tokens. Thread-safe: `_lock` guards
    `_exact`.

    Args:
        tokens: the last so many tokens of a sequence are recent, and all of a block that has one of them; 0: none are.
        exact: records on disk that are coded exactly.

    Example:
        >>> RecentBlocks(128, [7]).keeps(7)
        True
    """

    def __init__(self, tokens: int, exact: Iterable[int] = ()) -> None:
        self.tokens = tokens
        self._exact = set(exact) if tokens else set()
        self._lock = Lock()

    def keeps(self, record: int) -> bool:
        """Whether a block is to be coded exactly."""
        return record in self._exact

    def codec(self, codec: Codec, record: int) -> Codec:
        """Return what codes a block of a tier: its codec, unless that loses something of a recent block."""
        return codec if codec.exact or not self.keeps(record) else RECENT_CODEC

    def moved_on(self, match: Match, blocks: Sequence[Block], tokens: int) -> list[int]:
        """Note that a sequence was put.

        Args:
            match: what was stored of it before.
            blocks: its new blocks; the recent ones are to be coded exactly from now on.
            tokens: its length.

        Returns:
            The records that are recent no longer.
        """
        if not self.tokens:
            return []
        end = min(tokens - self.tokens, match.depth)
        pairs = zip(match.records.tolist(), match.ends.tolist(), strict=True)
        with self._lock:
            aged = [record for record, stop in pairs if stop <= end and record in self._exact]
            self._exact.difference_update(aged)
            self._exact.update(block.record for block in blocks if block.end > tokens - self.tokens)
        return aged

    def keep(self, records: Iterable[int]) -> None:
        """Note that records are exact, so that `moved_on` names them again."""
        with self._lock:
            self._exact.update(records)

    def forget(self, record: int) -> None:
        """Note that a record is gone."""
        if self.tokens:
            with self._lock:
                self._exact.discard(record)
