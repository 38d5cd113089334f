"""Many prompts in parts that are computed apart: about equal work, and as little as can be done twice. Pure.

In the order of their tokens, prompts of one subtree are neighbours. A cut between two of them costs what they begin
with in common, which both parts compute; nothing else is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from kvstore.core.tokens import Tokens
from kvstore.integrations.transformers.segments import in_order, shared_tokens

_SLACK = 0.1  # of a part: how far a cut may move to where neighbours share less


def parts_of(prompts: Iterable[Sequence[int] | Tokens], count: int) -> list[list[Tokens]]:
    """Return prompts in at most `count` parts, each in the order of its tokens.

    Args:
        prompts: token ids; repeated ones count once, empty ones not at all.
        count: of parts.

    Raises:
        ValueError: a prompt is no list of token ids, or count is below 1.

    Example:
        >>> [[part.tolist() for part in parts] for parts in parts_of([[1, 2], [7, 8], [1, 3], [7, 9]], 2)]
        [[[1, 2], [1, 3]], [[7, 8], [7, 9]]]
    """
    if count < 1:
        raise ValueError(f"count: expected at least 1 part, found {count}")
    ordered = in_order(prompts)
    if not ordered:
        return []
    shared = np.array([0, *(shared_tokens(a, b) for a, b in pairwise(ordered))])
    return _cut(ordered, shared, np.cumsum([len(tokens) for tokens in ordered] - shared), count)


def _cut(ordered: list[Tokens], shared: np.ndarray, done: np.ndarray, count: int) -> list[list[Tokens]]:
    """done: distinct tokens up to and with each prompt."""
    share, cuts = done[-1] / count, set[int]()
    for number in range(1, count):
        off = np.abs(done[:-1] - share * number)  # of a cut behind each prompt but the last
        if not len(off):
            break
        near = np.flatnonzero(off <= max(share * _SLACK, off.min()))
        cuts.add(int(near[np.lexsort((off[near], shared[near + 1]))[0]]) + 1)
    edges = [0, *sorted(cuts), len(ordered)]
    return [ordered[begin:end] for begin, end in pairwise(edges)]
