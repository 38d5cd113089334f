"""The tensors behind views, K and V of each layer in turn: where they are, and where their rows begin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.core.layout import KVLayout

if TYPE_CHECKING:
    import torch

RowTable = npt.NDArray[np.int64]
"""[3, tensors] int64: address of the first row, bytes from head to head, bytes from token to token."""


class TensorMemory:
    """Tensors `[heads, tokens, dim]` that all views of the same cache share, so that each thing is asked of them once:
    a view of a block would otherwise cut and question every tensor. Immutable and thread-safe.

    Example:
        >>> import torch
        >>> memory = TensorMemory([torch.zeros(2, 8, 16), torch.zeros(2, 8, 16)])
        >>> [list(tensor.shape) for tensor in memory.cut(2, 3)]
        [[2, 3, 16], [2, 3, 16]]
        >>> memory.places[1:].tolist()
        [[512, 512], [64, 64]]
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._given = tensors

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return self._given

    @property
    def device(self) -> torch.device:
        """Of the first tensor."""
        return self.tensors[0].device

    @cached_property
    def devices(self) -> frozenset[torch.device]:
        return frozenset(tensor.device for tensor in self.tensors)

    @cached_property
    def places(self) -> RowTable | None:
        """Where the rows are on the device of all; None if there are several, or the last dimension of one has gaps."""
        tensors = self.tensors
        if len(self.devices) > 1 or any(t.stride(2) != 1 and t.shape[2] > 1 for t in tensors):
            return None
        heads, tokens, _ = zip(*(t.stride() for t in tensors), strict=True)
        rows = np.array([[t.data_ptr() for t in tensors], heads, tokens], dtype=np.int64)
        rows[1:] *= tensors[0].element_size()
        return rows

    def places_from(self, start: int) -> RowTable | None:
        """Return `places` of the tokens from `start` on."""
        places = self.places
        if places is None or not start:
            return places
        places = places.copy()
        places[0] += places[2] * start
        return places

    def cut(self, start: int, tokens: int) -> list[torch.Tensor]:
        """Return the tensors of `tokens` tokens from `start` on."""
        return [tensor.narrow(1, start, tokens) for tensor in self.tensors]

    def part(self, halves: slice) -> TensorMemory:
        """Return some of the tensors."""
        return TensorMemory(self.tensors[halves])


class PackedMemory(TensorMemory):
    """Tensors that lie one after the other in a tensor of bytes, each contiguous. Made when they are asked for.

    Args:
        layout: of the tensors.
        tokens: how many tokens they hold.
        memory: uint8, on any device, of as many bytes as they take.
    """

    def __init__(self, layout: KVLayout, tokens: int, memory: torch.Tensor) -> None:
        self.layout, self.tokens, self.memory = layout, tokens, memory

    @cached_property
    def tensors(self) -> Sequence[torch.Tensor]:
        import torch

        dtype: torch.dtype = getattr(torch, self.layout.dtype)
        tensors, begin = [], 0
        for layer in self.layout.layers:
            for dim in (layer.key_dim, layer.value_dim):
                end = begin + layer.heads * self.tokens * dim * self.layout.item_bytes
                tensors.append(self.memory[begin:end].view(dtype).view(layer.heads, self.tokens, dim))
                begin = end
        return tensors

    @property
    def device(self) -> torch.device:
        return self.memory.device

    @cached_property
    def devices(self) -> frozenset[torch.device]:
        return frozenset([self.memory.device])

    @cached_property
    def places(self) -> RowTable | None:
        before, widths = packing(self.layout)
        rows = np.empty((3, len(widths)), dtype=np.int64)
        rows[0] = self.memory.data_ptr() + before * self.tokens
        rows[1] = widths * self.tokens
        rows[2] = widths
        return rows


@lru_cache(maxsize=64)
def row_shapes(layout: KVLayout) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return, for every tensor of a layout, its heads and the bytes of a token of one head, uint32 each."""
    heads = [x.heads for x in layout.layers for _ in range(2)]
    dims = [dim for x in layout.layers for dim in (x.key_dim, x.value_dim)]
    return np.array(heads, dtype=np.uint32), np.array(dims, dtype=np.uint32) * np.uint32(layout.item_bytes)


@lru_cache(maxsize=64)
def packing(layout: KVLayout) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return, for every tensor of a layout, the bytes before it and those of a row of one head, both for one token."""
    heads, row_bytes = row_shapes(layout)
    sizes = heads.astype(np.int64) * row_bytes
    return np.cumsum(sizes) - sizes, row_bytes.astype(np.int64)
