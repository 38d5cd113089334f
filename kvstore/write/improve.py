"""Stored blocks that lack what a put brings of windows or states; and tails that hold more than what follows them."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.windows import lacks_more
from kvstore.residency.block import Block
from kvstore.residency.coverage import Coverage
from kvstore.trie import Match, TrieIndex
from kvstore.write.plan import PutRequest


def improved(
    request: PutRequest, match: Match, index: TrieIndex, coverage: Coverage, block_tokens: int
) -> frozenset[int]:
    """Return the records of a sequence that are to be stored again, for the put has tokens which they lack.

    A block is replaced by one that lacks less. The last one may be the beginning of a longer block of another sequence:
    then a tail is to be stored beside that.

    Args:
        match: what the index knows of the sequence.
    """
    if not len(coverage) and not request.states:
        return frozenset()
    count, found = len(request.tokens), set[int]()
    tails = {end: record for record, end in index.tails(request.namespace, request.tokens)}
    for i, (record, end) in enumerate(zip(match.records.tolist(), match.ends.tolist(), strict=True)):
        start, stop = i * block_tokens, min((i + 1) * block_tokens, count)
        if end < stop:
            continue
        held = tails.get(stop, record if end == stop else 0)
        if stop == count and request.states and not coverage.has_states(held):
            found.add(record)
        elif stop < count and coverage.has_states(record):
            continue  # a block in the middle has no states: one with states stays
        elif lacks_more(request.layout, coverage.cut(held or record), request.cut, start, stop - start):
            found.add(record)
    return frozenset(found)


def keeps_tails(request: PutRequest, blocks: Sequence[Block], index: TrieIndex, coverage: Coverage) -> bool:
    """Return whether tails that these blocks continue are to stay, for one has tokens of windows that they lack, or
    states, which the end of the blocks does not have."""
    longer = {block.start: block for block in blocks}
    size = index.block_tokens
    for record, end in index.tails(request.namespace, request.tokens):
        start = end // size * size
        block = longer.get(start)
        if block is None or end >= block.end:
            continue
        cut = coverage.cut(record)
        if coverage.has_states(record) or lacks_more(request.layout, block.cut, cut, start, end - start):
            return True
    return False
