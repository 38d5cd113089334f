"""What a reader wants of one stored block."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.tokens import Tokens
from kvstore.tiers.base import Source


@dataclass(frozen=True)
class BlockRead:
    """A stored block that a get wants, or the beginning of one.

    Attributes:
        record: its number; 0 for a block from the remote tier, which is no record of this store.
        start: position of its first token in the sequence.
        tokens: the wanted token ids, the first of the record.
        parent_key: key of the block before; a record that is read from disk must prove with its own key that it
            follows that block.
        source: where the block is; must be released.
        key: of a block with just these tokens behind that one; None if it was not computed.
    """

    record: int
    start: int
    tokens: Tokens
    parent_key: bytes
    source: Source
    key: bytes | None = None

    @property
    def end(self) -> int:
        """Position behind the last wanted token."""
        return self.start + len(self.tokens)
