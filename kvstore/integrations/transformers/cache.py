"""A transformers cache that appends to the tensors it was restored into, instead of copying all of them every step.

A `DynamicLayer` concatenates: its first step after a restore copies the whole cache into fresh memory, and so does
every later one. A `GrowingLayer` has a reserve behind its tensors. What was written once is never overwritten, so its
tensors may be referred to like a DynamicLayer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers.cache_utils import (
    DummyLayer,
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
from kvstore.core.states import State
from kvstore.errors import UnsupportedCache

_GROWTH = 8  # a layer that is full is copied once, with space for an eighth more...
_LEAST_RESERVE = 64  # ...or for so many tokens


@dataclass
class Reserve:
    """Keys and values with free space behind them.

    Attributes:
        keys, values: `[batch, heads, capacity, dim]`.
        used: tokens that were ever written. Of the layers that share a reserve, the first one to append takes the
            space; the others copy.
    """

    keys: torch.Tensor
    values: torch.Tensor
    used: int


class GrowingLayer(DynamicLayer):
    """One layer of a cache, `[batch, heads, tokens, dim]`; `keys` and `values` are views of the tokens so far.

    After a crop, a beam reorder or anything else that replaces the tensors, the next update copies once. While
    gradients are recorded every update copies, as a DynamicLayer's does. Not thread-safe, like every cache.

    Example:
        >>> layer = GrowingLayer.of(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))
        >>> with torch.no_grad():
        ...     keys, values = layer.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
        >>> list(keys.shape)
        [1, 2, 4, 8]
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self._reserve: Reserve | None = None

    @classmethod
    def of(
        cls, keys: torch.Tensor, values: torch.Tensor, reserve: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> GrowingLayer:
        """Make a layer that starts as `keys` and `values`, without copying them.

        Args:
            keys, values: `[batch, heads, tokens, dim]`.
            reserve: the larger tensors that begin with `keys` and `values`. This layer alone may write into the rest.
        """
        layer = cls()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if reserve is not None:
            layer._reserve = Reserve(*reserve, used=keys.shape[-2])
        return layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        begin = self.get_seq_length()
        # What attention saved for a backward pass must not change, and slices of a reserve change with it.
        if begin == 0 or torch.is_grad_enabled():
            self._reserve = None
            return super().update(key_states, value_states, *args, **kwargs)
        end = begin + key_states.shape[-2]
        if not self._has_space(begin, end, key_states, value_states):
            self._reserve = self._larger(begin, end, key_states, value_states)
        reserve = cast(Reserve, self._reserve)
        reserve.keys[..., begin:end, :] = key_states
        reserve.values[..., begin:end, :] = value_states
        reserve.used = end
        self.keys, self.values = reserve.keys[..., :end, :], reserve.values[..., :end, :]
        return self.keys, self.values

    def reset(self) -> None:
        # Dropped, never zeroed: others may refer to them.
        self._reserve = self.keys = self.values = None
        self.is_initialized = False
        super().reset()

    def _has_space(self, begin: int, end: int, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        reserve = self._reserve
        return (
            reserve is not None
            and reserve.used == begin
            and reserve.keys.shape[-2] >= end
            and _begins(cast(torch.Tensor, self.keys), reserve.keys, key_states)
            and _begins(cast(torch.Tensor, self.values), reserve.values, value_states)
        )

    def _larger(self, begin: int, end: int, key_states: torch.Tensor, value_states: torch.Tensor) -> Reserve:
        capacity = end + max(_LEAST_RESERVE, end // _GROWTH)
        keys = _copied(cast(torch.Tensor, self.keys), key_states, capacity)
        return Reserve(keys, _copied(cast(torch.Tensor, self.values), value_states, capacity), begin)


def cache_from_layers(
    layers: KVLayers,
    reserve: KVLayers | None = None,
    layout: KVLayout | None = None,
    tokens: int = 0,
    states: Sequence[State] = (),
) -> Any:
    """Make a transformers `DynamicCache` that starts as these layers, without copying them or writing into them.

    Args:
        layers: per layer (K, V), each `[1, heads, tokens, dim]`; of layers with windows, the last tokens.
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
    made = [GrowingLayer.of(k, v, own) for (k, v), own in zip(layers, reserves, strict=True)]
    if layout is None or not (layout.is_grouped or layout.model_layers):
        cache.layers.extend(made)
        return cache
    cache.layers.extend(DummyLayer() for _ in range(layout.model_layers or len(made)))  # type: ignore[no-untyped-call]
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
        kind = type(layer)
        if kind is DummyLayer:
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


def _begins(part: torch.Tensor, reserve: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether `part` is the first tokens of `reserve`, into which `states` may be written as they are. Outside of
    inference mode nothing may be written into an inference tensor."""
    return (
        part.data_ptr() == reserve.data_ptr()
        and part.shape[:-2] == reserve.shape[:-2]
        and part.stride() == reserve.stride()
        and states.dtype == reserve.dtype
        and states.device == reserve.device
        and (torch.is_inference_mode_enabled() or not reserve.is_inference())
    )


def _copied(part: torch.Tensor, states: torch.Tensor, capacity: int) -> torch.Tensor:
    """`part` with space for `capacity` tokens, in the dtype that concatenating both would have."""
    if part.device != states.device:
        raise RuntimeError(f"the cache is on {part.device}, but the new keys and values are on {states.device}")
    dtype = part.dtype if part.dtype == states.dtype else torch.promote_types(part.dtype, states.dtype)
    larger = torch.empty((*part.shape[:-2], capacity, part.shape[-1]), dtype=dtype, device=part.device)
    larger[..., : part.shape[-2], :] = part
    return larger
