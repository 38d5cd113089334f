"""Transformers caches made of the tensors of a hit, and taken apart into layers again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from kvstore.core.cache_layers import check_at_rest
from kvstore.core.layout import KVLayers, KVLayout
from kvstore.core.lazy_layers import LazyLayers
from kvstore.core.states import State
from kvstore.errors import UnsupportedCache
from kvstore.integrations.transformers.growing_layer import GrowingLayer
from kvstore.integrations.transformers.lazy_layer import LazyLayer

# What stands where a layer keeps nothing; before transformers 5.23, layers of states that have none.
Placeholder: Any = getattr(cache_utils, "DummyLayer", LinearAttentionLayer)


def cache_from_layers(
    layers: KVLayers | LazyLayers,
    reserve: KVLayers | None = None,
    layout: KVLayout | None = None,
    tokens: int = 0,
    states: Sequence[State] = (),
) -> Any:
    """Make a transformers `DynamicCache` that starts as these layers, without copying them or writing into them.

    Args:
        layers: per layer (K, V), each `[1, heads, tokens, dim]`; of layers with windows, the last tokens. Of
            `LazyLayers` the layers of the cache wait until each is there.
        reserve: per layer, see `GrowingLayer.of`.
        layout: which layers have windows, and where they stand in the model's cache; None: none has, and they stand as
            they are given.
        tokens: how many tokens the cache is of, if there is a layout.
        states: of layers that keep states; they are copied.

    Example:
        >>> cache_from_layers(((torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)),)).get_seq_length()
        3
    """
    cache = DynamicCache()
    reserves = [None] * len(layers) if reserve is None else reserve
    if isinstance(layers, LazyLayers):
        made: list[GrowingLayer] = [
            LazyLayer.of_pending(k, v, own, partial(layers.wait, number))
            for number, ((k, v), own) in enumerate(zip(layers.tensors, reserves, strict=True))
        ]
    else:
        made = [GrowingLayer.of(k, v, own) for (k, v), own in zip(layers, reserves, strict=True)]
    if layout is None or not (layout.is_grouped or layout.model_layers):
        cache.layers.extend(made)
        return cache
    cache.layers.extend(Placeholder() for _ in range(layout.model_layers or len(made)))
    own = len(layout.place_of)
    for number, (layer, (k, v)) in enumerate(zip(layout.layers[:own], layers[:own], strict=True)):
        cache.layers[layout.place_of[number]] = _windowed(layer.window, k, v, tokens) if layer.window else made[number]
    for place, halves in zip(layout.indexed, layers[own:], strict=True):
        cache.layers[place] = _indexed(cache.layers[place], halves)
    for place in layout.states:
        cache.layers[place] = _with_states(cache.layers[place], [state for state in states if state.place == place])
    return cache


def _with_states(layer: Any, states: Sequence[State]) -> Any:
    """A layer with states, and with the tokens of `layer`, if it has any."""
    count = max((state.number + 1 for state in states), default=1)
    if getattr(layer, "keys", None) is None:
        made: Any = LinearAttentionLayer(number_of_states=count)
    else:
        made = (
            LinearAttentionAndSlidingWindowAttentionLayer(layer.sliding_window, number_of_states=count)
            if layer.is_sliding
            else LinearAttentionAndFullAttentionLayer(number_of_states=count)
        )
        made.lazy_initialization(layer.keys, layer.values)
        made.keys, made.values = layer.keys, layer.values
        if layer.is_sliding:
            made.cumulative_length = layer.cumulative_length
    for state in states:
        number = state.number
        if state.conv is not None:
            made.lazy_initialization(conv_states=state.conv, state_idx=number)
            made.conv_states[number].copy_(state.conv)
        if state.recurrent is not None:
            made.lazy_initialization(recurrent_states=state.recurrent, state_idx=number)
            made.recurrent_states[number].copy_(state.recurrent)
            made.dtype, made.device = made.dtype or state.recurrent.dtype, made.device or state.recurrent.device
        made.has_previous_state[number] = state.has_previous
    return made


def _indexed(layer: Any, halves: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """A layer with the tokens of `layer`, and with the keys of an indexer, given as halves `[1, 1, tokens, dim]`."""
    made = DynamicIndexedLayer()  # type: ignore[no-untyped-call]
    made.lazy_initialization(layer.keys, layer.values)
    made.keys, made.values = layer.keys, layer.values
    keys = torch.cat([half[:, 0] for half in halves], -1)
    made.lazy_initialization_indexer(keys)
    made.indexer_keys = keys
    return made


def _windowed(window: int, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> Any:
    """A layer with a window that has seen `tokens` tokens, and keeps the last."""
    layer = DynamicSlidingWindowLayer(sliding_window=window)
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values, layer.cumulative_length = keys, values, tokens
    return layer


def plain_cache(cache: Any, config: Any) -> Any:
    """Return a cache of the same tokens that looks as one which a model made by itself: `DynamicCache(config=config)`,
    with contiguous tensors, and no layers that append in place.

    A compiled model makes graphs of its own for other classes and strides. What is contiguous is not copied.

    Args:
        cache: of a hit, or an empty one. Not to be used any more.
        config: of the model.

    Example:
        >>> from transformers import LlamaConfig
        >>> cache = cache_from_layers(((torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)),))
        >>> plain = plain_cache(cache, LlamaConfig(num_hidden_layers=1))
        >>> type(plain.layers[0]).__name__, plain.get_seq_length()
        ('DynamicLayer', 3)
    """
    made: Any = DynamicCache(config=config)
    made.layers[:] = map(_plain_layer, cache.layers)
    if getattr(cache, "is_approximate", False):
        made.is_approximate = True
    return made


def _plain_layer(layer: Any) -> Any:
    if not issubclass(type(layer), GrowingLayer):
        return layer
    keys, values = layer.keys.contiguous(), layer.values.contiguous()
    made = DynamicLayer()  # type: ignore[no-untyped-call]
    made.lazy_initialization(keys, values)
    made.keys, made.values = keys, values
    return made


def cache_layers(cache: Any) -> KVLayers:
    """Return the layers of a transformers cache, without copying them.

    Args:
        cache: a cache whose layers hold keys and values as the model computed them.

    Returns:
        Per layer (K, V), each `[batch, heads, tokens, dim]`. A static cache is cut to the tokens it holds; a layer with
        a window has the last tokens; layers that keep nothing of their own are left out.

    Raises:
        UnsupportedCache: names the class of a layer that is not supported, or that the cache is empty or offloaded.

    Example:
        >>> cache = cache_from_layers(((torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)),))
        >>> [list(keys.shape) for keys, values in cache_layers(cache)]
        [[1, 2, 3, 8]]
    """
    check_at_rest(cache)
    pairs = []
    for number, layer in enumerate(getattr(cache, "layers", ())):
        if isinstance(layer, LazyLayer):
            layer.settle()
        kind = type(layer)
        if kind is Placeholder:
            continue
        if kind not in (DynamicLayer, GrowingLayer, StaticLayer, DynamicSlidingWindowLayer, StaticSlidingWindowLayer):
            raise UnsupportedCache(f"layer {number} of the cache is a {kind.__name__}, which is not supported")
        if layer.keys is None or layer.values is None or not layer.is_initialized:
            raise UnsupportedCache(f"layer {number} of the cache is an empty {kind.__name__}; run the model first")
        length = min(int(layer.get_seq_length()), layer.keys.shape[-2])
        pairs.append((layer.keys[..., :length, :], layer.values[..., :length, :]))
    if not pairs:
        raise UnsupportedCache(f"{type(cache).__name__} has no layers that can be stored")
    return tuple(pairs)
