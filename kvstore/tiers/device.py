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
    """One block, all layers, raw or coded, in memory of its own. Immutable and thread-safe.

    Attributes:
        info: what is known of the block.
        memory: uint8, on its device.
        view: of the raw tensors in the memory; None if they are coded.
        layer_sizes: bytes of each layer if they are coded, else empty.
        on_cpu: whether the memory is on the CPU.

    Example:
        >>> import numpy as np, torch
        >>> layout = KVLayout.uniform(num_layers=1, heads=2, head_dim=16)
        >>> info = BlockInfo(layout, np.arange(64, dtype=np.uint32), start=0)
        >>> k = v = torch.ones(2, 64, 16).bfloat16()
        >>> block = DeviceBlock.coded(info, KVView.of_layers(layout, [(k, v)]))
        >>> back = torch.zeros_like(k), torch.zeros_like(v)
        >>> block.copy_to(KVView.of_layers(layout, [back]))
        >>> torch.equal(back[0], k), block.nbytes < info.layer_bytes()[0]
        (True, True)
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
        """Copy `source` on the device that holds it (or its first layer, if a model is spread over several)."""
        device = "cpu" if source.on_cpu else source.device
        memory, view = _packed(info.layout, info.count, device, source.on_cpu)
        move(source, view)
        return cls(info, memory, view, (), source.on_cpu)

    @classmethod
    def coded(cls, info: BlockInfo, source: KVView) -> DeviceBlock:
        """Code `source` with splitzip on the device that holds it; copy it raw if the device cannot do that."""
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
        """Write the first `target.tokens` tokens to `target`, on any device. Done on return.

        Coded blocks are decoded where they are, which takes memory there.

        Raises:
            CodecError: the memory is damaged.
            torch.OutOfMemoryError: the device has too little memory to decode in.
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
        """Return the same block in host memory. The CPU decodes it there if it is coded."""
        memory, view = self.memory.cpu(), None
        if self.view is not None:
            view = KVView.of_bytes(self.info.layout, self.info.count, memory)
        return DeviceBlock(self.info, memory, view, self.layer_sizes, True)

    def _decode(self, target: KVView) -> None:
        from kvstore.codecs.splitzip.kernels.blocks import decode

        device = self.memory.device
        if target.devices == {device}:
            decode(self.memory, self.layer_sizes, self.info.count, target)
            return
        memory, buffer = _packed(target.layout, target.tokens, device, False)
        decode(self.memory, self.layer_sizes, self.info.count, buffer)
        if not target.on_cpu:
            move(buffer, target)
            return
        fetched = memory.cpu()  # all at once, where copying tensor by tensor would wait for each
        KVView.packed(target.layout, target.tokens, fetched.data_ptr(), fetched).copy_to(target)


def _bytes(memory: torch.Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)


def _packed(layout: KVLayout, tokens: int, device: Any, rows: bool) -> tuple[torch.Tensor, KVView]:
    """Memory for raw tensors one after the other, and the view of them. rows: it is on the CPU, and has rows there."""
    import torch

    memory = torch.empty(tokens * layout.bytes_per_token, dtype=torch.uint8, device=device)
    return memory, KVView.of_bytes(layout, tokens, memory, on_cpu=rows)


DeviceTier = MemoryTier[DeviceBlock]
