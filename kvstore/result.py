"""The tensors that `get` returns."""

from __future__ import annotations

from typing import Any

import torch

from kvstore.layout import KVLayers, KVLayout


def allocate(layout: KVLayout, tokens: int) -> KVLayers:
    """Per layer (K, V), each `[1, heads, tokens, dim]` on the CPU, contents undefined; pinned where CUDA is."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    pinned = torch.cuda.is_available()
    return tuple(
        (
            torch.empty((1, x.heads, tokens, x.key_dim), dtype=dtype, pin_memory=pinned),
            torch.empty((1, x.heads, tokens, x.value_dim), dtype=dtype, pin_memory=pinned),
        )
        for x in layout.layers
    )


def deliver(layers: KVLayers, device: Any) -> KVLayers:
    """The same tensors on `device` (None: as they are). All copies are under way before the first is waited for."""
    if device is None or torch.device(device).type == "cpu":
        return layers
    moved = tuple((k.to(device, non_blocking=True), v.to(device, non_blocking=True)) for k, v in layers)
    if torch.device(device).type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return moved
