"""transformers' QuantizedCache with HQQ: its own quantiser, groups of 64, its default axis."""

from __future__ import annotations

import torch
from transformers.cache_utils import HQQQuantizedLayer

from benchmarks.peers.quality.each_tensor import EachTensor


class Hqq(EachTensor):
    """bits: 4 or 2."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self._layer = HQQQuantizedLayer(nbits=bits)
        # The layer takes device and type from the keys that it holds.
        self._layer.keys = torch.empty(0, dtype=torch.bfloat16)
        self._bits = bits

    def coded(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        coded, meta = self._layer._quantize(tensor[None].contiguous(), axis=0)
        size = tensor.numel() * self._bits // 8 + meta["scale"].nbytes + meta["zero"].nbytes
        with self.decoding:
            return self._layer._dequantize((coded, meta))[0], size


make = Hqq
