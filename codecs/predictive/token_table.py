"""What layer 0 holds of a token: a row of K and V for every token of the vocabulary, or for those that were seen."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.arrays import Array, SectionArrays
from kvstore.core.tokens import Tokens


def token_table(taken: SectionArrays, width: int) -> tuple[Array, Array | None]:
    """Take the table of a section "lossless".

    Returns:
        Its rows, int8 `[n, width]`, and the tokens whose they are, uint32 `[n]`, ascending; None if row i is that of
        token i.

    Raises:
        ProfileError: names the array that is missing or malformed.
    """
    if "seen_kv" not in taken.arrays:
        return taken.take("token_kv", np.int8, (taken.size("token_kv"), width)), None
    count = taken.size("seen_kv")
    tokens = taken.take("seen_tokens", np.uint32, (count,))
    if (tokens[1:] <= tokens[:-1]).any():
        raise taken.error("seen_tokens", "expected ascending tokens, none twice")
    return taken.take("seen_kv", np.int8, (count, width)), tokens


def rows_of(tokens: Tokens, seen: Array) -> Tokens:
    """Return the row of each token in a table of tokens that were `seen`; `len(seen)` for those that have none."""
    at = np.minimum(np.searchsorted(seen, tokens), len(seen) - 1)
    return np.where(seen[at] == tokens, at, len(seen)).astype(np.uint32)
