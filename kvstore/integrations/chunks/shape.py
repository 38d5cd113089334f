"""`ChunkShape`: the memory of a piece as keys and values of layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.core.layout import ITEM_BYTES, KVLayout, LayerLayout

_LEAST_TOKENS = 8  # whose 256 bits are those of a hash
_RAW_TOKENS, _RAW_WIDTH = 64, 1 << 16


@dataclass(frozen=True)
class ChunkShape:
    """How the memory of a piece is taken apart. Immutable.

    `[2, layers, tokens, dim]` has keys first; of any other `[..., tokens, dim]` the halves of the rows stand for keys
    and values; and there are plain bytes.

    Attributes:
        dims: of the memory; of bytes their number alone.
        dtype: a name in `ITEM_BYTES`, "bytes" of bytes.

    Example:
        >>> ChunkShape.of((2, 30, 256, 192), "bfloat16").layout.layers[0].key_dim
        192
        >>> ChunkShape.of((1000,), "uint8").folder
        'bytes-1000'
    """

    dims: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, dims: Sequence[int], dtype: str) -> ChunkShape:
        """Return the shape of memory that has these dimensions; `dtype` as torch names it, without "torch."."""
        sizes = tuple(int(x) for x in dims)
        if dtype in ITEM_BYTES and len(sizes) >= 2 and sizes[-2] >= _LEAST_TOKENS:
            planes = math.prod(sizes[:-2])
            halves = _is_pair(sizes) or (sizes[-1] % 2 == 0)
            if halves and 1 <= planes <= 1024 and 1 <= sizes[-1] <= 1 << 16:
                return cls(sizes, dtype)
        item = ITEM_BYTES.get(dtype, 1) if dtype in ITEM_BYTES else torch.empty(0, dtype=getattr(torch, dtype)).itemsize
        return cls((math.prod(sizes) * item,), "bytes")

    @property
    def nbytes(self) -> int:
        """Bytes of a piece."""
        return math.prod(self.dims) * (ITEM_BYTES[self.dtype] if self.dtype != "bytes" else 1)

    @property
    def folder(self) -> str:
        """The name of the folder of its store."""
        return f"{self.dtype}-{'x'.join(map(str, self.dims))}"

    @property
    def tokens(self) -> int:
        """How many tokens its sequences have."""
        if self.dtype != "bytes":
            return self.dims[-2]
        return _RAW_TOKENS * max(1, -(-self.dims[0] // (_RAW_TOKENS * 4 * _RAW_WIDTH)))

    @property
    def layout(self) -> KVLayout:
        """The layout of its sequences."""
        if self.dtype == "bytes":  # as if they were bf16: the store's codecs give back every bit of anything
            width = max(1, -(-self.dims[0] // (4 * self.tokens)))
            return KVLayout((LayerLayout(1, width, width),), "bfloat16")
        if _is_pair(self.dims):
            return KVLayout((LayerLayout(1, self.dims[-1], self.dims[-1]),) * self.dims[1], self.dtype)
        half = self.dims[-1] // 2
        return KVLayout((LayerLayout(1, half, half),) * math.prod(self.dims[:-2]), self.dtype)

    def split(self, memory: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return per layer (K, V), `[1, tokens, dim]`, of memory of `nbytes` bytes: views of it, a copy of bytes that
        do not fill whole rows."""
        return self._layers(self._padded(torch.from_numpy(np.frombuffer(memory, np.uint8))))

    def join(self, layers: Any, memory: Any) -> None:
        """Write what `split` made, `[1, 1, tokens, dim]` as a hit has it, to writable memory of `nbytes` bytes."""
        target = torch.from_numpy(np.frombuffer(memory, np.uint8))
        whole = self._padded(target)
        for (k, v), (keys, values) in zip(self._layers(whole), layers, strict=True):
            k.copy_(keys[0])
            v.copy_(values[0])
        if whole is not target:
            target.copy_(whole[: self.nbytes])

    def _padded(self, raw: torch.Tensor) -> torch.Tensor:
        """Bytes filled up to whole rows with zeros; the same tensor if they fill them."""
        missing = self.layout.bytes_per_token * self.tokens - len(raw)
        return torch.cat([raw, torch.zeros(missing, dtype=torch.uint8)]) if missing else raw

    def _layers(self, raw: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        values = raw.view(getattr(torch, self.layout.dtype))
        if self.dtype != "bytes" and _is_pair(self.dims):
            keys, others = values.view(self.dims)
            return [(keys[layer][None], others[layer][None]) for layer in range(self.dims[1])]
        planes = values.view(len(self.layout.layers), self.tokens, -1)
        half = planes.shape[-1] // 2
        return [(plane[None, :, :half], plane[None, :, half:]) for plane in planes]


def _is_pair(dims: tuple[int, ...]) -> bool:
    return len(dims) == 4 and dims[0] == 2


def shape_of(folder: str) -> ChunkShape | None:
    """Return the shape that `ChunkShape.folder` names so; None if there is none."""
    dtype, _, sizes = folder.partition("-")
    if not sizes.replace("x", "0").isdigit():
        return None
    shape = ChunkShape(tuple(int(x) for x in sizes.split("x") if x), dtype)
    return shape if dtype in (*ITEM_BYTES, "bytes") and shape.folder == folder else None
