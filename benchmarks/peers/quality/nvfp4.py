"""NVFP4, as TensorRT-LLM keeps cold pages: e2m1 in blocks of 16 along a head, an e4m3 scale each, one fp32 a tensor."""

from __future__ import annotations

import torch

from benchmarks.peers.quality.each_tensor import EachTensor

BLOCK = 16
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1, and their negatives
LARGEST, LARGEST_SCALE = 6.0, 448.0


class Nvfp4(EachTensor):
    """The scale of a tensor is that of its own values, as of a page; where it is calibrated it is no better."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.tensor(VALUES)
        self._values = torch.cat([values, -values])
        self._between = (values[1:] + values[:-1]) / 2

    def coded(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        blocks = tensor.float().reshape(-1, BLOCK)
        whole = blocks.abs().max().clamp(min=1e-30) / (LARGEST * LARGEST_SCALE)
        scale = (blocks.abs().amax(1, keepdim=True) / LARGEST / whole).to(torch.float8_e4m3fn).float() * whole
        scaled = blocks / scale.clamp(min=1e-30)
        nearest = torch.bucketize(scaled.abs().clamp(max=LARGEST), self._between) + 8 * (scaled < 0)
        size = blocks.numel() // 2 + len(blocks) + 4
        with self.decoding:
            return (self._values[nearest] * scale).view(tensor.shape), size
