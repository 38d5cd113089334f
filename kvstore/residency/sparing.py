"""What of a sequence may leave the index, and what must not, when it is erased."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvstore.core.tokens import Tokens
from kvstore.trie.index import TrieIndex


def stored_end(index: TrieIndex, namespace: bytes, tokens: Tokens) -> int:
    """Return how many leading tokens of a sequence may be erased.

    All if they are stored; else as many as are, if no other sequence goes on there; else 0.
    """
    match = index.match(namespace, tokens, touch=False)
    if match.depth >= len(tokens):
        return len(tokens)
    for record, end in reversed(list(zip(match.records.tolist(), match.ends.tolist(), strict=True))):
        if record and end <= match.depth:
            return end if index.leaf(record) is not None else 0
    return 0


@contextlib.contextmanager
def sparing(index: TrieIndex, namespace: bytes, tokens: Tokens) -> Iterator[None]:
    """Keep the blocks that end within these tokens in the index inside the block, whatever is erased."""
    spared = tokens[: index.longest_prefix(namespace, tokens)] if len(tokens) else tokens
    if not len(spared):
        yield
        return
    index.pin(namespace, spared)
    try:
        yield
    finally:
        index.unpin(namespace, spared)
