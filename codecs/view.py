"""A view of the keys and values of a run of tokens, all layers: the one currency between caches, codecs and tiers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import kvstore.codecs._native as _native
from kvstore.core.layout import KVLayout

if TYPE_CHECKING:
    import torch

RowTable = npt.NDArray[np.int64]
"""[3, tensors] int64: address of the first row, bytes from head to head, bytes from token to token."""


class KVView:
    """Keys and values of `tokens` consecutive tokens; tensor order is K of layer 0, V of layer 0, K of layer 1, ...

    Memory on the CPU is described by a row table, so that a block of all layers is copied by one call that holds
    no GIL; tensors on another device are copied by torch. `owner` keeps the memory alive as long as the view.
    Views are immutable; what they point to is not.
    """

    __slots__ = ("_detached", "_rows", "_start", "_tensors", "layout", "owner", "tokens")

    def __init__(
        self,
        layout: KVLayout,
        tokens: int,
        rows: RowTable | None,
        tensors: Sequence[torch.Tensor] | None,
        owner: Any = None,
        start: int = 0,
        detached: bool = False,
    ) -> None:
        self.layout = layout
        self.tokens = tokens
        self.owner = owner
        self._rows = rows
        self._tensors = tensors
        self._start = start
        self._detached = detached  # a copy, not the tensors it was made of: to be read only

    @classmethod
    def of_layers(cls, layout: KVLayout, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> KVView:
        """A view of per-layer `[heads, tokens, dim]` tensors that have the layout's shapes and dtype.

        Tensors on the CPU whose last dimension is not contiguous are copied: such a view can only be read.
        """
        given = [tensor for pair in layers for tensor in pair]
        tensors, rows = given, None
        if all(t.device.type == "cpu" for t in given):
            # A last dimension that is not contiguous has no rows to copy.
            tensors = [t if t.stride(2) == 1 or t.shape[2] == 1 else t.contiguous() for t in given]
            item = layout.item_bytes
            rows = np.array(
                [
                    [t.data_ptr() for t in tensors],
                    [t.stride(0) * item for t in tensors],
                    [t.stride(1) * item for t in tensors],
                ],
                dtype=np.int64,
            )
        detached = any(t is not g for t, g in zip(tensors, given, strict=True))
        return cls(layout, tensors[0].shape[1], rows, tensors, tensors, detached=detached)

    @classmethod
    def packed(cls, layout: KVLayout, tokens: int, address: int, owner: Any) -> KVView:
        """A view of memory at `address` that holds the tensors one after the other, each `[heads, tokens, dim]`."""
        offsets, widths = _packing(layout)
        rows = np.empty((3, len(widths)), dtype=np.int64)
        rows[0] = address + offsets * tokens
        rows[1] = widths * tokens
        rows[2] = widths
        return cls(layout, tokens, rows, None, owner)

    @property
    def on_cpu(self) -> bool:
        return self._rows is not None

    @property
    def nbytes(self) -> int:
        return self.tokens * self.layout.bytes_per_token

    @property
    def rows(self) -> RowTable:
        """Where the rows are in memory. Raises `ValueError` for tensors on a device."""
        if self._rows is None:
            raise ValueError("a view of tensors on a device has no rows")
        return self._rows

    @property
    def writable(self) -> bool:
        """Whether what is written to the rows arrives in the tensors that the view was made of."""
        return not self._detached

    def narrow(self, start: int, tokens: int) -> KVView:
        """The view of `tokens` tokens from `start`."""
        if start < 0 or tokens < 0 or start + tokens > self.tokens:
            raise ValueError(f"narrow: {start}+{tokens} lies outside of {self.tokens} tokens")
        rows = None
        if self._rows is not None:
            rows = self._rows.copy()
            rows[0] += rows[2] * start
        return KVView(self.layout, tokens, rows, self._tensors, self.owner, self._start + start, self._detached)

    def layer(self, number: int) -> KVView:
        """The view of one layer, as a layout of one layer."""
        single = _single(self.layout, number)
        rows = None if self._rows is None else np.ascontiguousarray(self._rows[:, 2 * number : 2 * number + 2])
        tensors = None if self._tensors is None else self._tensors[2 * number : 2 * number + 2]
        return KVView(single, self.tokens, rows, tensors, self.owner, self._start, self._detached)

    def tensors(self) -> list[torch.Tensor]:
        """The `[heads, tokens, dim]` tensors behind a view that was made of tensors."""
        if self._tensors is None:
            raise ValueError("a packed view has no tensors")
        return [t.narrow(1, self._start, self.tokens) for t in self._tensors]

    def copy_to(self, target: KVView) -> None:
        """Copies all rows into `target` (same layout, same number of tokens). Mutates what target points to."""
        if target.layout != self.layout or target.tokens != self.tokens:
            raise ValueError("copy_to: the views differ in layout or tokens")
        if target._detached:
            raise ValueError("copy_to: the last dimension of every tensor of the target must be contiguous")
        if self._rows is not None and target._rows is not None:
            heads, row_bytes = row_shapes(self.layout)
            _native.copy_rows(target._rows, self._rows, heads, row_bytes, self.tokens)
            return
        if target._rows is not None:
            # From a device to rows in memory: packed memory has no tensors that torch could copy to.
            fetched = [tensor.cpu() for tensor in self.tensors()]
            pairs = list(zip(fetched[::2], fetched[1::2], strict=True))
            KVView.of_layers(self.layout, pairs).copy_to(target)
            return
        for to, source in zip(target.tensors(), self.tensors(), strict=True):
            to.copy_(source)


@lru_cache(maxsize=64)
def row_shapes(layout: KVLayout) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Of every tensor: heads, and bytes of a token of one head."""
    heads = [x.heads for x in layout.layers for _ in range(2)]
    dims = [dim for x in layout.layers for dim in (x.key_dim, x.value_dim)]
    return np.array(heads, dtype=np.uint32), np.array(dims, dtype=np.uint32) * np.uint32(layout.item_bytes)


@lru_cache(maxsize=64)
def _packing(layout: KVLayout) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Per tensor: bytes before it and bytes of a row of one head, both for one token."""
    heads, row_bytes = row_shapes(layout)
    sizes = heads.astype(np.int64) * row_bytes
    return np.cumsum(sizes) - sizes, row_bytes.astype(np.int64)


@lru_cache(maxsize=4096)
def _single(layout: KVLayout, number: int) -> KVLayout:
    return KVLayout((layout.layers[number],), layout.dtype, layout.rope)
