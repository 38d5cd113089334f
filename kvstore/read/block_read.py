"""What a reader wants of one stored block."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.tokens import Tokens
from kvstore.tiers.base import Source


@dataclass(frozen=True)
class BlockRead:
    """The first `tokens` of a record, which stand at `start` of the sequence.

    parent_key: key of the block before; a record from outside memory must prove with its own key that it follows it.
    """

    record: int
    start: int
    tokens: Tokens
    parent_key: bytes
    source: Source

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)
