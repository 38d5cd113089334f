"""Layouts with states, and the caches that a model with such layers would have: functions of the tokens alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from kvcases import kv_of
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)
from windowcases import kept

from kvstore import Hit, KVLayout, LayerLayout
from kvstore.integrations.transformers.cache import cache_from_layers

ONLY_STATES = KVLayout((), "bfloat16", model_layers=2, states=(0, 1))
ALTERNATING = KVLayout((LayerLayout(2, 16, 16),), "bfloat16", places=(2,), model_layers=4, states=(0, 1))
HYBRID = KVLayout((LayerLayout(2, 16, 16), LayerLayout(1, 8, 8)), "bfloat16", model_layers=3, states=(0, 1))
WITH_WINDOWS = KVLayout(
    (LayerLayout(2, 16, 16, "sliding", 20), LayerLayout(1, 8, 8)),
    "bfloat16",
    places=(1, 3),
    model_layers=4,
    states=(0, 2),
)
LAYOUTS = {"states": ONLY_STATES, "alternating": ALTERNATING, "hybrid": HYBRID, "windows": WITH_WINDOWS}


def state(ids: Any, place: int, part: int) -> torch.Tensor:
    """A tensor that depends on all tokens."""
    seed = int(np.asarray(ids, np.uint64).sum()) * 7 + len(ids) * 1_000_003 + place * 31 + part
    generator = torch.Generator().manual_seed(seed)
    shape = (1, 6, 4) if part == 0 else (1, 3, 5, 7)
    values = torch.randn(shape, generator=generator, dtype=torch.float32)
    return values.to(torch.bfloat16) if part == 0 else values


def cache_of(ids: Any, layout: KVLayout) -> Any:
    """The cache of a sequence, of transformers' own classes."""
    cache = DynamicCache()
    if layout.layers:
        plain = KVLayout(layout.layers, layout.dtype, places=layout.places, model_layers=layout.model_layers)
        pairs = tuple((k[None], v[None]) for k, v in kept(ids, layout))
        cache = cache_from_layers(pairs, None, plain, len(ids))
    else:
        cache.layers.extend(DummyLayer() for _ in range(layout.model_layers))
    for place in layout.states:
        below = cache.layers[place]
        hybrid = getattr(below, "keys", None) is not None
        layer = LinearAttentionAndFullAttentionLayer() if hybrid else LinearAttentionLayer()
        if hybrid:
            layer.update(below.keys, below.values)
        layer.update_conv_state(state(ids, place, 0))
        layer.update_recurrent_state(state(ids, place, 1))
        cache.layers[place] = layer
    return cache


def is_state_of(hit: Hit, ids: Any, layout: KVLayout) -> bool:
    """Whether a hit, and the cache that it makes, are bit for bit those of its tokens."""
    ids = np.asarray(ids)[: hit.tokens]
    want, got = cache_of(ids, layout), hit.cache()
    for one, other in zip(want.layers, got.layers, strict=True):
        for name in ("keys", "values"):
            mine, its = getattr(one, name, None), getattr(other, name, None)
            if (mine is None) != (its is None) or (mine is not None and not _same(mine, its)):
                return False
        if isinstance(one, LinearAttentionLayer) and not (
            type(one) is type(other)
            and one.has_previous_state == other.has_previous_state
            and _same(one.conv_states[0], other.conv_states[0])
            and _same(one.recurrent_states[0], other.recurrent_states[0])
        ):
            return False
    return len(kv_of(ids, layout)) == len(hit.layers)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    raw = [x.contiguous().view(-1).view(torch.uint8) for x in (one, other)]
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*raw)
