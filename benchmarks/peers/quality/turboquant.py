"""turboquant of PyPI (github.com/back2matching/turboquant): a random rotation of every head, one codebook, its norm.

It keeps a byte for each number of 3 bits; they are counted as if it packed them, and the norms as it keeps them, fp32.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.peers.quality.each_tensor import EachTensor

if not hasattr(np, "trapz"):  # gone in NumPy 2.4; the library still calls it
    np.trapz = np.trapezoid  # type: ignore[attr-defined]

from turboquant import TurboQuantMSE


class TurboQuant(EachTensor):
    def __init__(self, bits: int) -> None:
        super().__init__()
        self._bits = bits
        self._quantisers: dict[int, TurboQuantMSE] = {}

    def coded(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        dim = tensor.shape[-1]
        if dim not in self._quantisers:
            self._quantisers[dim] = TurboQuantMSE(dim=dim, bits=self._bits, device="cpu", seed=42)
        indices, norms = self._quantisers[dim].quantize(tensor.reshape(-1, dim))
        size = (indices.numel() * self._bits + 7) // 8 + norms.nbytes
        with self.decoding:
            return self._quantisers[dim].dequantize(indices, norms).view(tensor.shape), size


make = TurboQuant
