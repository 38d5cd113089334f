"""Which prefixes of a sequence can be used, if layers with windows lack some of its tokens (docs/layouts.md).

A layer with a window keeps the last `window - 1` tokens of a cache. One number tells what is stored of a cache, its
*cut*: the length of the cache whose windows were applied, or 0 if every layer has all tokens. A prefix of n tokens can
be used if each such layer has the last `window - 1` tokens before n. Pure: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.layout import KVLayers, KVLayout


def cut_of(layout: KVLayout, layers: KVLayers, length: int) -> int:
    """Return the cut of a cache of `length` tokens; the layers are `[heads, tokens, dim]`, its last tokens."""
    begins = ((length - k.shape[1], layer.window) for (k, _), layer in zip(layers, layout.layers, strict=True))
    return max((begin + window - 1 for begin, window in begins if begin and window), default=0)


def block_cut(layout: KVLayout, cut: int, start: int, tokens: int) -> int:
    """Return the cut of a block of a cache with this cut: 0 if no layer lacks any of its tokens."""
    return cut if cut and any(group.missing(cut, start, tokens) for group in layout.groups) else 0


def lacks_more(layout: KVLayout, cut: int, other: int, start: int, tokens: int) -> bool:
    """Return whether a block with this cut lacks tokens, in some layer, which one with the cut `other` has.

    Example:
        >>> from kvstore.core.layout import LayerLayout
        >>> layout = KVLayout((LayerLayout(2, 8, 8, "sliding", 17),), "bfloat16")
        >>> lacks_more(layout, 64, 40, start=32, tokens=16), lacks_more(layout, 40, 64, start=32, tokens=16)
        (True, False)
    """
    return any(group.missing(cut, start, tokens) > group.missing(other, start, tokens) for group in layout.groups)


def raw_bytes(layout: KVLayout, cut: int, start: int, tokens: int) -> int:
    """Return what the keys and values of a block take before coding, without states.

    Example:
        >>> from kvstore.core.layout import LayerLayout
        >>> layout = KVLayout((LayerLayout(2, 8, 8), LayerLayout(2, 8, 8, "sliding", 17)), "bfloat16")
        >>> raw_bytes(layout, 0, 0, 16), raw_bytes(layout, 24, 0, 16)
        (2048, 1536)
    """
    if not layout.is_grouped:
        return layout.bytes_per_token * tokens
    return sum(group.layout.bytes_per_token * (tokens - group.missing(cut, start, tokens)) for group in layout.groups)


def usable_end(layout: KVLayout, block_tokens: int, cuts: Sequence[int], ends: Sequence[int], limit: int) -> int:
    """Return how many tokens the longest usable prefix of blocks has, 0 if there is none.

    Args:
        cuts: of the blocks of the sequence, from its first on.
        ends: the position behind the last token of each; that of the last may lie behind `limit`.
        limit: at most so many tokens, which the blocks hold without a gap.

    Example:
        >>> from kvstore.core.layout import LayerLayout
        >>> layout = KVLayout((LayerLayout(2, 8, 8, "sliding", 17),), "bfloat16")
        >>> usable_end(layout, 16, cuts=[40, 40, 0], ends=[16, 32, 40], limit=40)
        40
        >>> usable_end(layout, 16, cuts=[40, 40, 0], ends=[16, 32, 40], limit=39)
        0
    """
    windows = [group.window for group in layout.groups if group.window]
    for i in range(min(len(cuts), -(-limit // block_tokens)) - 1, -1, -1):
        start, cut = i * block_tokens, cuts[i]
        # It lacks [start, min(cut - window + 1, end)), and a prefix needs the last window - 1 tokens.
        stops = [min(cut, ends[i] + window - 1) for window in windows if cut - window + 1 > start]
        if start < limit < max(stops, default=0):
            limit = start
    return limit
