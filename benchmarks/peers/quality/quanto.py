"""transformers' QuantizedCache with optimum-quanto: its own quantiser, groups of 64, its default axis."""

from __future__ import annotations

import torch
from transformers.cache_utils import QuantoQuantizedLayer

from benchmarks.peers.quality.each_tensor import EachTensor


class Quanto(EachTensor):
    """bits: 4 or 2."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self._layer = QuantoQuantizedLayer(nbits=bits)
        self._bits = bits

    def coded(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        coded = self._layer._quantize(tensor[None].contiguous(), axis=0)
        size = tensor.numel() * self._bits // 8 + coded._scale.nbytes + coded._shift.nbytes
        with self.decoding:
            return self._layer._dequantize(coded)[0], size


make = Quanto
