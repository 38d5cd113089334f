"""Blocks on the device that computed them, raw or coded there, each in one allocation that nothing else shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.codecs.base import BlockInfo
from kvstore.codecs.device import codes_on_device, move
from kvstore.codecs.splitzip.codec import SplitZipCodec
from kvstore.codecs.view import KVView
from kvstore.core.layout import KVLayout
from kvstore.tiers.base import TensorSource
from kvstore.tiers.memory import MemoryTier

if TYPE_CHECKING:
    import torch

_CODEC = SplitZipCodec()


@dataclass(frozen=True)
class DeviceBlock(TensorSource):
    """One block, all layers.

    memory: uint8, on its device. view: of the raw tensors in it, None where they are coded. layer_sizes: where they
    are, the bytes of each layer. on_cpu: whether the CPU's codec coded them; the bytes are the same.
    """

    info: BlockInfo
    memory: torch.Tensor
    view: KVView | None
    layer_sizes: tuple[int, ...]
    on_cpu: bool

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def tier(self) -> str:
        return "device"

    @classmethod
    def raw(cls, info: BlockInfo, source: KVView) -> DeviceBlock:
        """A copy of `source` on the device it is on (its first layer, where a model is spread over several)."""
        device = "cpu" if source.on_cpu else source.tensors()[0].device
        memory, view = _tensors(info.layout, info.count, device, source.on_cpu)
        move(source, view)
        return cls(info, memory, view, (), source.on_cpu)

    @classmethod
    def coded(cls, info: BlockInfo, source: KVView) -> DeviceBlock:
        """`source` coded with splitzip where it is; raw where its device cannot do that."""
        if source.on_cpu:
            import torch

            out = torch.empty(_CODEC.bound(info), dtype=torch.uint8)
            sizes = _CODEC.encode(info, source, _bytes(out))
            assert sizes is not None
            return cls(info, out[: sum(sizes)].clone(), None, sizes, True)
        if not codes_on_device(_CODEC, source):
            return cls.raw(info, source)
        from kvstore.codecs.splitzip.kernels.blocks import encode

        memory, sizes = encode(source)
        return cls(info, memory, None, sizes, False)

    def copy_to(self, target: KVView) -> None:
        """Writes the first `target.tokens` tokens to `target`, on any device, and is done on return.

        Coded blocks are decoded where they are, which takes memory there: torch may raise `OutOfMemoryError`. Raises
        `CodecError` where the memory was damaged.
        """
        if self.view is not None:
            move(self.view.narrow(0, target.tokens), target)
        elif self.on_cpu:
            _CODEC.decode(self.info, _bytes(self.memory), self.layer_sizes, target)
        else:
            self._decode(target)

    def reaches(self, device: torch.device) -> bool:
        return self.memory.device == device

    def fetched(self) -> DeviceBlock:
        """The same in host memory, where the CPU decodes what is coded."""
        memory, view = self.memory.cpu(), None
        if self.view is not None:
            tensors = _cut(memory, self.info.layout, self.info.count)
            view = KVView.of_layers(self.info.layout, list(zip(tensors[::2], tensors[1::2], strict=True)))
        return DeviceBlock(self.info, memory, view, self.layer_sizes, True)

    def _decode(self, target: KVView) -> None:
        from kvstore.codecs.splitzip.kernels.blocks import decode

        device = self.memory.device
        if not target.on_cpu and all(tensor.device == device for tensor in target.tensors()):
            decode(self.memory, self.layer_sizes, self.info.count, target)
            return
        memory, buffer = _tensors(target.layout, target.tokens, device, False)
        decode(self.memory, self.layer_sizes, self.info.count, buffer)
        if not target.on_cpu:
            move(buffer, target)
            return
        fetched = memory.cpu()  # all at once, where copying tensor by tensor would wait for each
        KVView.packed(target.layout, target.tokens, fetched.data_ptr(), fetched).copy_to(target)


def _bytes(memory: torch.Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)


def _tensors(layout: KVLayout, tokens: int, device: Any, rows: bool) -> tuple[torch.Tensor, KVView]:
    """Memory for raw tensors one after the other, and the view of them. rows: it is on the CPU, and has rows there."""
    import torch

    memory = torch.empty(tokens * layout.bytes_per_token, dtype=torch.uint8, device=device)
    if rows:
        return memory, KVView.packed(layout, tokens, memory.data_ptr(), memory)
    return memory, KVView(layout, tokens, None, _cut(memory, layout, tokens), memory)


def _cut(memory: torch.Tensor, layout: KVLayout, tokens: int) -> list[torch.Tensor]:
    """The tensors that lie in `memory` one after the other, each `[heads, tokens, dim]`."""
    import torch

    dtype: torch.dtype = getattr(torch, layout.dtype)
    tensors, begin = [], 0
    for layer in layout.layers:
        for dim in (layer.key_dim, layer.value_dim):
            end = begin + layer.heads * tokens * dim * layout.item_bytes
            tensors.append(memory[begin:end].view(dtype).view(layer.heads, tokens, dim))
            begin = end
    return tensors


DeviceTier = MemoryTier[DeviceBlock]
