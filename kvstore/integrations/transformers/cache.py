"""A transformers cache that appends to the tensors it was restored into, instead of copying all of them every step.

A `DynamicLayer` concatenates: its first step after a restore copies the whole cache into fresh memory, and so does
every later one. A `GrowingLayer` has room behind its tensors. What was written once is never overwritten, so its
tensors may be referred to like a DynamicLayer's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticLayer

from kvstore.errors import UnsupportedCache
from kvstore.layout import KVLayers

_GROWTH = 8  # a layer that is full is copied once, with room for an eighth more...
_LEAST_ROOM = 64  # ...or for so many tokens


@dataclass
class Room:
    """Keys and values with room behind them, `[batch, heads, capacity, dim]`. used: tokens that were ever written; the
    layer that appends first takes the place, whoever else shares the room copies."""

    keys: torch.Tensor
    values: torch.Tensor
    used: int


class GrowingLayer(DynamicLayer):
    """One layer, `[batch, heads, tokens, dim]`. `keys` and `values` are views of the tokens so far.

    After a crop, a beam reorder or anything else that puts other tensors in their place, the next update copies
    once; where gradients are recorded every update does, as a DynamicLayer's. Not thread-safe, as all caches.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self._room: Room | None = None

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
            layer._room = Room(*room, used=keys.shape[-2])
        return layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        begin = self.get_seq_length()
        # What attention saved for a backward pass must not change, and slices of a room change with it.
        if begin == 0 or torch.is_grad_enabled():
            self._room = None
            return super().update(key_states, value_states, *args, **kwargs)
        end = begin + key_states.shape[-2]
        if not self._has_room(begin, end, key_states, value_states):
            self._room = self._larger(begin, end, key_states, value_states)
        room = cast(Room, self._room)
        room.keys[..., begin:end, :] = key_states
        room.values[..., begin:end, :] = value_states
        room.used = end
        self.keys, self.values = room.keys[..., :end, :], room.values[..., :end, :]
        return self.keys, self.values

    def reset(self) -> None:
        # Dropped, never zeroed: others may refer to them.
        self._room = self.keys = self.values = None
        self.is_initialized = False
        super().reset()

    def _has_room(self, begin: int, end: int, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        room = self._room
        return (
            room is not None
            and room.used == begin
            and room.keys.shape[-2] >= end
            and _begins(cast(torch.Tensor, self.keys), room.keys, key_states)
            and _begins(cast(torch.Tensor, self.values), room.values, value_states)
        )

    def _larger(self, begin: int, end: int, key_states: torch.Tensor, value_states: torch.Tensor) -> Room:
        capacity = end + max(_LEAST_ROOM, end // _GROWTH)
        keys = _copied(cast(torch.Tensor, self.keys), key_states, capacity)
        return Room(keys, _copied(cast(torch.Tensor, self.values), value_states, capacity), begin)


def cache_from_layers(layers: KVLayers, room: KVLayers | None = None) -> Any:
    """A transformers `DynamicCache` that starts as these (K, V), each `[1, heads, tokens, dim]`, without copying
    them, and never writes into them. room: see `GrowingLayer.of`, per layer."""
    cache = DynamicCache()
    rooms = [None] * len(layers) if room is None else room
    cache.layers.extend(GrowingLayer.of(k, v, own) for (k, v), own in zip(layers, rooms, strict=True))
    return cache


def cache_layers(cache: Any) -> KVLayers:
    """Per layer (K, V), each `[batch, heads, tokens, dim]`, views of a transformers cache.

    A static cache is cut to the tokens it holds. Raises `UnsupportedCache` naming the class of a layer that
    does not hold every key and value as the model computed it.
    """
    pairs = []
    for number, layer in enumerate(getattr(cache, "layers", ())):
        kind = type(layer)
        if kind not in (DynamicLayer, GrowingLayer, StaticLayer):
            raise UnsupportedCache(f"layer {number} of the cache is a {kind.__name__}: not supported")
        if layer.keys is None or layer.values is None or not layer.is_initialized:
            raise UnsupportedCache(f"layer {number} of the cache is an empty {kind.__name__}")
        length = int(layer.get_seq_length())
        pairs.append((layer.keys[..., :length, :], layer.values[..., :length, :]))
    if not pairs:
        raise UnsupportedCache(f"{type(cache).__name__} has no layers that can be stored")
    return tuple(pairs)


def _begins(part: torch.Tensor, room: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether `part` is the first tokens of `room`, in which `states` may be written as they are (an inference tensor
    cannot be outside of inference mode)."""
    return (
        part.data_ptr() == room.data_ptr()
        and part.shape[:-2] == room.shape[:-2]
        and part.stride() == room.stride()
        and states.dtype == room.dtype
        and states.device == room.device
        and (torch.is_inference_mode_enabled() or not room.is_inference())
    )


def _copied(part: torch.Tensor, states: torch.Tensor, capacity: int) -> torch.Tensor:
    """`part` with room for `capacity` tokens, in the dtype that concatenating both would have."""
    if part.device != states.device:
        raise RuntimeError(f"the cache is on {part.device}, what is to be appended on {states.device}")
    dtype = part.dtype if part.dtype == states.dtype else torch.promote_types(part.dtype, states.dtype)
    room = torch.empty((*part.shape[:-2], capacity, part.shape[-1]), dtype=dtype, device=part.device)
    room[..., : part.shape[-2], :] = part
    return room
