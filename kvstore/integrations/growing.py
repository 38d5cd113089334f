"""A transformers cache that appends to the tensors it was restored into, instead of copying all of them every step.

A `DynamicLayer` concatenates: its first step after a restore copies the whole cache into fresh memory, and so does
every later one. A `GrowingLayer` has room behind its tensors. What was written once is never overwritten, so its
tensors may be referred to like a DynamicLayer's.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvstore.layout import KVLayers

_GROWTH = 8  # a layer that is full is copied once, with room for an eighth more...
_LEAST_ROOM = 64  # ...or for so many tokens


class GrowingLayer(DynamicLayer):
    """One layer, `[batch, heads, tokens, dim]`. `keys` and `values` are views of the tokens so far.

    After a crop, a beam reorder or anything else that puts other tensors in their place, the next update copies
    once; under autograd every update does, as a DynamicLayer's. Not thread-safe, as all caches.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self._own: tuple[torch.Tensor, torch.Tensor] | None = None  # keys and values with room behind them
        self._used = 0  # tokens of it that were ever written

    @classmethod
    def of(
        cls, keys: torch.Tensor, values: torch.Tensor, room: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> GrowingLayer:
        """A layer that starts as `keys` and `values`, without copying them. room: the larger tensors that these are
        the beginning of, whose rest is this layer's alone to write."""
        layer = cls()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if room is not None:
            layer._own = room
            layer._used = keys.shape[-2]
        return layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        begin = self.get_seq_length()
        if begin == 0 or (torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)):
            self._own = None
            return super().update(key_states, value_states, *args, **kwargs)
        end = begin + key_states.shape[-2]
        keys, values = self._room(begin, end, key_states, value_states)
        keys[..., begin:end, :] = key_states
        values[..., begin:end, :] = value_states
        self._used = end
        self.keys, self.values = keys[..., :end, :], values[..., :end, :]
        return self.keys, self.values

    def reset(self) -> None:
        self._own = None
        super().reset()

    def _room(
        self, begin: int, end: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors that hold the layer's tokens and are its own to write from `begin` to `end`."""
        room = self._own
        held_keys, held_values = cast(torch.Tensor, self.keys), cast(torch.Tensor, self.values)
        if (
            room is None
            or self._used != begin
            or room[0].shape[-2] < end
            or not _begins(held_keys, room[0])
            or not _begins(held_values, room[1])
        ):
            capacity = end + max(_LEAST_ROOM, end // _GROWTH)
            room = _larger(held_keys, key_states, capacity), _larger(held_values, value_states, capacity)
            self._own = room
        return room


def cache_from_layers(layers: KVLayers, room: KVLayers | None = None) -> Any:
    """A transformers `DynamicCache` that starts as these (K, V), each `[1, heads, tokens, dim]`, without copying
    them, and never writes into them. room: see `GrowingLayer.of`, per layer."""
    cache = DynamicCache()
    rooms = [None] * len(layers) if room is None else room
    cache.layers.extend(GrowingLayer.of(k, v, own) for (k, v), own in zip(layers, rooms, strict=True))
    return cache


def _begins(part: torch.Tensor, room: torch.Tensor) -> bool:
    """Whether `part` is the first tokens of `room`, which may be written here (not so an inference tensor outside
    of inference mode)."""
    return (
        part.data_ptr() == room.data_ptr()
        and part.shape[:-2] == room.shape[:-2]
        and part.stride() == room.stride()
        and (torch.is_inference_mode_enabled() or not room.is_inference())
    )


def _larger(part: torch.Tensor, states: torch.Tensor, capacity: int) -> torch.Tensor:
    shape = (*part.shape[:-2], capacity, part.shape[-1])
    room = torch.empty(shape, dtype=torch.promote_types(part.dtype, states.dtype), device=part.device)
    room[..., : part.shape[-2], :] = part
    return room
