"""turboquant of PyPI (github.com/back2matching/turboquant): a random rotation of every head, one codebook, its norm.

It keeps a byte for each number of 3 bits; they are counted as if it packed them, and the norms as it keeps them, fp32.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.peers.quality.data import Pairs

if not hasattr(np, "trapz"):  # gone in NumPy 2.4; the library still calls it
    np.trapz = np.trapezoid  # type: ignore[attr-defined]

from turboquant import TurboQuantMSE


class TurboQuant:
    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._quantisers: dict[int, TurboQuantMSE] = {}

    def code(self, tokens: torch.Tensor, pairs: Pairs, start: int) -> tuple[Pairs, int]:
        size, decoded = 0, []
        for pair in pairs:
            found = []
            for tensor in pair:
                dim = tensor.shape[-1]
                if dim not in self._quantisers:
                    self._quantisers[dim] = TurboQuantMSE(dim=dim, bits=self._bits, device="cpu", seed=42)
                indices, norms = self._quantisers[dim].quantize(tensor.reshape(-1, dim))
                size += (indices.numel() * self._bits + 7) // 8 + norms.nbytes
                found.append(self._quantisers[dim].dequantize(indices, norms).view(tensor.shape).to(tensor.dtype))
            decoded.append((found[0], found[1]))
        return decoded, size


make = TurboQuant
