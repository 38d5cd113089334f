"""Blocks of AQUA-KV (codec 5) as bytes, as tensors of a layer, and as rows of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """K and V of a layer in packed bytes, which it shares.

    Attributes:
        shape: of the layer.
        tokens: that it has.
        dtype: the layout's.
        sides: the bytes of K and of V.
    """

    shape: LayerLayout
    tokens: int
    dtype: str
    sides: tuple[Bytes, Bytes]

    @property
    def nbytes(self) -> int:
        """Of K and V."""
        return self.sides[0].nbytes + self.sides[1].nbytes

    def tensor(self, side: int) -> torch.Tensor:
        """K (0) or V (1), `[heads, tokens, dim]`."""
        import torch

        dim = self.shape.value_dim if side else self.shape.key_dim
        whole = torch.from_numpy(self.sides[side]).view(getattr(torch, self.dtype))
        return whole.view(self.shape.heads, self.tokens, dim)

    def words(self, side: int) -> npt.NDArray[np.uint16]:
        """The same as the bits of 16-bit numbers, flat."""
        return self.sides[side].view(np.uint16)


def layers_of(layout: KVLayout, tokens: int, raw: Bytes) -> list[LayerMemory]:
    """The layers of so many tokens in the packed bytes `raw`, which they share."""
    at, found = 0, []
    for shape in layout.layers:
        k, v = (shape.heads * tokens * dim * layout.item_bytes for dim in (shape.key_dim, shape.value_dim))
        found.append(LayerMemory(shape, tokens, layout.dtype, (raw[at : at + k], raw[at + k : at + k + v])))
        at += k + v
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
