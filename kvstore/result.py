"""The tensors that `get` returns."""

from __future__ import annotations

from typing import Any

import torch

from kvstore.codecs import KVView
from kvstore.config import MIB
from kvstore.layout import KVLayers, KVLayout

# Up to this size the time to make and to describe tensors one by one is what a get takes; larger results are better
# made of tensors that can be freed one by one.
_AT_ONCE_BYTES = 8 * MIB


def allocate(layout: KVLayout, tokens: int) -> tuple[KVLayers, KVView]:
    """Per layer (K, V), each `[1, heads, tokens, dim]` on the CPU, contents undefined; pinned where CUDA is. And the
    view of them."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    pinned = torch.cuda.is_available()
    first = layout.layers[0]
    alike = layout.is_uniform and not pinned
    if alike and tokens * layout.bytes_per_token <= _AT_ONCE_BYTES:
        shape = (2 * len(layout.layers), 1, first.heads, tokens, first.key_dim)
        memory = torch.empty(shape, dtype=dtype)
        tensors = memory.unbind()
        return tuple(zip(tensors[::2], tensors[1::2], strict=True)), KVView.packed(
            layout, tokens, memory.data_ptr(), memory
        )
    layers = tuple(
        (
            torch.empty((1, x.heads, tokens, x.key_dim), dtype=dtype, pin_memory=pinned),
            torch.empty((1, x.heads, tokens, x.value_dim), dtype=dtype, pin_memory=pinned),
        )
        for x in layout.layers
    )
    return layers, KVView.of_layers(layout, [(k[0], v[0]) for k, v in layers])


def deliver(layers: KVLayers, device: Any) -> KVLayers:
    """The same tensors on `device` (None: as they are). All copies are under way before the first is waited for."""
    if device is None or torch.device(device).type == "cpu":
        return layers
    moved = tuple((k.to(device, non_blocking=True), v.to(device, non_blocking=True)) for k, v in layers)
    if torch.device(device).type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return moved
