"""Which new blocks are to be coded against which stored ones, and which of them others may be coded against.

A block whose tokens others hold too, at other places or behind other beginnings, becomes a member of their family; one
that stands alone is entered in the content index, as a donor for what comes later. Deltas have depth 1, for only blocks
that stand alone are in that index.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.codecs.donor.spans import MAX_SPANS
from kvstore.core.tokens import Tokens
from kvstore.residency.block import Block
from kvstore.residency.residency import Residency
from kvstore.trie.content import ContentIndex, DonorSpan
from kvstore.trie.worth import span_worth

# Tokens before a block that are looked at too: they tell a seam from the middle of a passage.
_CONTEXT_TOKENS = 512
# A block whose tokens are worth less than this share of it stands alone: that does not pay for reading the donors.
_LEAST_SHARE = 0.4
_MOST_SPANS = 16
assert _MOST_SPANS <= MAX_SPANS


@dataclass(frozen=True)
class DonorMatcher:
    """Finds donors for new blocks, and offers new blocks as donors. `plan` is for one thread at a time.

    Attributes:
        content: where donors are found by their tokens.
        members: whether blocks may be coded against others; otherwise they are offered as donors only.
        stored_only: donors must be on disk already.

    Example:
        >>> from kvstore import StoreConfig
        >>> from kvstore.metrics import Metrics
        >>> from kvstore.trie import TrieIndex
        >>> content = ContentIndex()
        >>> residency = Residency(StoreConfig(), TrieIndex(64), Metrics(), content)
        >>> DonorMatcher(residency, content, 64, members=True, stored_only=False).plan([])
        []
    """

    residency: Residency
    content: ContentIndex
    block_tokens: int
    members: bool
    stored_only: bool

    def plan(self, blocks: Sequence[Block]) -> list[tuple[DonorSpan, ...]]:
        """Return, for each block, the spans of it that donors hold; () for a block that stands alone.

        On return a block that stands alone is in the content index, and a member has joined its donors' families, so
        that these stay as long as it does.
        """
        plans: list[tuple[DonorSpan, ...]] = []
        chain: list[Block] = []
        for block in [*blocks, None]:
            if block is None or (chain and block.parent != chain[-1].record):
                plans += self._plan_chain(chain)
                chain = []
            if block is not None:
                chain.append(block)
        return plans

    def stand_alone(self, block: Block) -> None:
        """Take a block that is coded without donors after all out of their families; it may be a donor now."""
        self.residency.leave_family(block)

    def _plan_chain(self, chain: Sequence[Block]) -> list[tuple[DonorSpan, ...]]:
        if not chain:
            return []
        path = self._path(chain) if self.members else None
        plans = []
        for block in chain:
            spans: tuple[DonorSpan, ...] = ()
            if path is not None and block.end <= len(path[0]) and self._may_join(block):
                spans = self._match(block, *path)
            if spans:
                spans = spans if self.residency.join(block, _donors(spans)) else ()
            if not spans:
                self.residency.offer(block)
            plans.append(spans)
        return plans

    def _may_join(self, block: Block) -> bool:
        return not block.alone and not self.residency.is_kept(block.record)

    def _path(self, chain: Sequence[Block]) -> tuple[Tokens, npt.NDArray[np.uint64]] | None:
        """All tokens of the sequence up to the end of the last block that is not replaced yet, and its records; None
        where there is none. Looked up once: for each block it would be walked from the beginning."""
        for block in reversed(chain):
            with contextlib.suppress(KeyError):
                namespace, tokens = self.residency.index.path(block.record)
                return tokens, self.residency.index.match(namespace, tokens, touch=False).records
        return None

    def _match(self, block: Block, tokens: Tokens, own: npt.NDArray[np.uint64]) -> tuple[DonorSpan, ...]:
        begin = max(0, block.start - _CONTEXT_TOKENS)
        # What follows the block tells more of the blocks that its end lies in.
        window = np.ascontiguousarray(tokens[begin : block.end + self.block_tokens])
        # Its own sequence says little that its context does not, and would leave holes where others look for this one.
        here = own[: -(-block.end // self.block_tokens)]
        found = self.content.find(block.namespace, window, block.start - begin, exclude=here)
        spans: list[DonorSpan] = []
        for span in found:
            start = begin + span.start - block.start
            length = min(span.length, len(block.tokens) - start)
            if length > 0 and len(spans) < _MOST_SPANS and self._may_serve(span.record):
                spans.append(DonorSpan(start, length, span.record, span.donor_start, span.run))
        if sum(span_worth(span.run, span.length) for span in spans) < _LEAST_SHARE * len(block.tokens):
            return ()
        self.residency.use_donors([span.record for span in spans])
        return tuple(spans)

    def _may_serve(self, donor: int) -> bool:
        residency = self.residency
        if not residency.may_serve(donor):
            return False
        return not self.stored_only or (residency.disk is not None and residency.disk.holds(donor))


def _donors(spans: Sequence[DonorSpan]) -> list[int]:
    return list(dict.fromkeys(span.record for span in spans))
