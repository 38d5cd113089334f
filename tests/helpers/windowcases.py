"""Layouts with windows, and the caches that a model with such layers would keep."""

from __future__ import annotations

from typing import Any

import numpy as np
from kvcases import INTEGERS, Layers, kv_of

from kvstore import Hit, KVLayout, LayerLayout

WINDOWED = KVLayout(
    (
        LayerLayout(2, 16, 16),
        LayerLayout(2, 16, 16, "sliding", 20),
        LayerLayout(1, 24, 8),
        LayerLayout(2, 16, 8, "sliding", 20),
        LayerLayout(1, 8, 8, "chunked", 11),
    ),
    "bfloat16",
)
ONLY_SLIDING = KVLayout((LayerLayout(2, 16, 16, "sliding", 20),) * 3, "bfloat16")


def kept(ids: Any, layout: KVLayout = WINDOWED) -> Layers:
    """The cache of a sequence: a function of its tokens, of which layers with windows keep the last."""
    count = len(ids)
    firsts = [layer.first_kept(count) for layer in layout.layers]
    return [(k[:, first:], v[:, first:]) for (k, v), first in zip(kv_of(ids, layout), firsts, strict=True)]


def is_kept(hit: Hit, ids: Any, layout: KVLayout = WINDOWED) -> bool:
    """Whether a hit holds, bit for bit, what the model would have kept of its tokens."""
    want = kept(np.asarray(ids)[: hit.tokens], layout)
    bits = INTEGERS[layout.dtype]
    return len(hit.layers) == len(want) and all(
        one[0].shape == other.shape and bool((one[0].contiguous().view(bits) == other.contiguous().view(bits)).all())
        for pair, expected in zip(hit.layers, want, strict=True)
        for one, other in zip(pair, expected, strict=True)
    )
