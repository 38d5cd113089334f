"""A method that codes every tensor by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from benchmarks.peers.quality.clock import Clock
from benchmarks.peers.quality.data import Pairs


class EachTensor(ABC):
    """Codes the tensors of a cache one by one; `coded` decodes `with self.decoding`."""

    def __init__(self) -> None:
        self.decoding = Clock()

    @abstractmethod
    def coded(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """What comes back of one tensor `[heads, n, dim]`, and how many bytes it took."""

    def code(self, tokens: torch.Tensor, pairs: Pairs, start: int) -> tuple[Pairs, int]:
        size, decoded = 0, []
        for k, v in pairs:
            (new_k, k_bytes), (new_v, v_bytes) = self.coded(k), self.coded(v)
            decoded.append((new_k.to(k.dtype), new_v.to(v.dtype)))
            size += k_bytes + v_bytes
        return decoded, size
