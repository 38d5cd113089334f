"""Raw blocks on the device that computed them, as tensors of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.codecs.view import KVView
from kvstore.tiers.base import MemoryTier

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceBlock:
    """One block, all layers, packed in one allocation that nothing else shares."""

    view: KVView
    memory: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @classmethod
    def copy_of(cls, source: KVView) -> DeviceBlock:
        """Copies the rows of `source` on the device they are on."""
        import torch

        layout = source.layout
        device = "cpu" if source.on_cpu else source.tensors()[0].device
        memory = torch.empty(source.nbytes, dtype=torch.uint8, device=device)
        if source.on_cpu:
            view = KVView.packed(layout, source.tokens, memory.data_ptr(), memory)
        else:
            view = KVView(layout, source.tokens, None, _unpack(memory, source), memory)
        source.copy_to(view)
        return cls(view, memory)


def _unpack(memory: torch.Tensor, like: KVView) -> list[torch.Tensor]:
    views, begin = [], 0
    for tensor in like.tensors():
        end = begin + tensor.numel() * tensor.element_size()
        views.append(memory[begin:end].view(tensor.dtype).view(tensor.shape))
        begin = end
    return views


DeviceTier = MemoryTier[DeviceBlock]
