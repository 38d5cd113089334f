"""transformers' QuantizedCache with optimum-quanto: its own quantiser, groups of 64, its default axis."""

from __future__ import annotations

import torch
from transformers.cache_utils import QuantoQuantizedLayer

from benchmarks.peers.quality.data import Pairs


class Quanto:
    """bits: 4 or 2."""

    def __init__(self, bits: int) -> None:
        self._layer = QuantoQuantizedLayer(nbits=bits)
        self._bits = bits

    def code(self, tokens: torch.Tensor, pairs: Pairs, start: int) -> tuple[Pairs, int]:
        size, decoded = 0, []
        for pair in pairs:
            found = []
            for tensor in pair:
                coded = self._layer._quantize(tensor[None].contiguous(), axis=0)
                size += tensor.numel() * self._bits // 8 + coded._scale.nbytes + coded._shift.nbytes
                found.append(self._layer._dequantize(coded)[0].to(tensor.dtype))
            decoded.append((found[0], found[1]))
        return decoded, size


make = Quanto
