"""Blocks of AQUA-KV (codec 5) as bytes, as tensors of a layer, and as rows of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.codecs.aqua.higgs import Bytes, Floats
from kvstore.codecs.view import KVView
from kvstore.core.layout import KVLayout, LayerLayout

if TYPE_CHECKING:
    import torch


def widths(shape: LayerLayout) -> tuple[int, int]:
    """Values of a token in K and in V."""
    return shape.heads * shape.key_dim, shape.heads * shape.value_dim


def split_layers(payload: memoryview, sizes: Sequence[int]) -> list[Bytes]:
    """The bytes of each layer, which they share with the payload."""
    return np.split(np.frombuffer(payload, np.uint8), np.cumsum(sizes)[:-1])


def packed(layout: KVLayout, tokens: int, raw: Bytes) -> KVView:
    """A view of the packed bytes `raw` of so many tokens."""
    return KVView.packed(layout, tokens, raw.ctypes.data, raw)


def tensors(layout: KVLayout, tokens: int, raw: Bytes) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of every layer, `[heads, tokens, dim]`, in the packed bytes `raw`, which they share."""
    import torch

    whole, at, found = torch.from_numpy(raw), 0, []
    for shape in layout.layers:
        pair = []
        for dim in (shape.key_dim, shape.value_dim):
            size = shape.heads * tokens * dim * layout.item_bytes
            part = whole[at : at + size].view(getattr(torch, layout.dtype))
            pair.append(part.view(shape.heads, tokens, dim))
            at += size
        found.append((pair[0], pair[1]))
    return found


def rows_of(tensor: torch.Tensor) -> Floats:
    """`[heads, tokens, dim]` -> float32 `[tokens, heads * dim]`."""
    rows: Floats = tensor.float().transpose(0, 1).reshape(tensor.shape[1], tensor.shape[0] * tensor.shape[2]).numpy()
    return rows


def store_rows(tensor: torch.Tensor, rows: Floats) -> None:
    """The inverse of `rows_of`; what is too large for the tensor's type becomes its largest number."""
    import torch

    largest = torch.finfo(tensor.dtype).max
    values = torch.from_numpy(rows).clamp(-largest, largest)
    tensor.copy_(values.view(tensor.shape[1], tensor.shape[0], -1).transpose(0, 1))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes in the order of its dimensions."""
    import torch

    data: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return data


def fill(tensor: torch.Tensor, data: Bytes) -> None:
    """`tensor` `[heads, tokens, dim]` from its bytes."""
    import torch

    if tensor.numel():
        tensor.copy_(torch.from_numpy(data.copy()).view(tensor.dtype).view(tensor.shape))
