"""What the exact modes of the predictive codec share: a block is coded on the device that holds it, or on the CPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.codecs.base import BlockInfo
from kvstore.codecs.device import buffer_on_cpu, copy_on_cpu, wait_for
from kvstore.codecs.in_order import InOrder
from kvstore.codecs.predictive.on_device import Devices
from kvstore.codecs.view import KVView
from kvstore.core.layout import KVLayout
from kvstore.errors import CodecError

if TYPE_CHECKING:
    import torch

    from kvstore.codecs.predictive.kernels.blocks import Loaded


class DeviceMode(ABC):
    """Codes blocks of a model's layout, on the device that holds them or on the CPU. Thread-safe.

    Blocks that several threads code on a device at the same time are coded there in one call. A subclass says what the
    CPU does, and how its model gets on a device.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._devices: Devices[Loaded] = Devices(layout, self._tried)

    def encode(
        self, info: BlockInfo, block: KVView, out: memoryview, limit: int
    ) -> tuple[KVView, tuple[int, ...] | int | None]:
        """Code a block of the model's layout into `out`, which is mutated.

        Returns:
            The block on the device that coded it, and one of: the bytes of each layer; None if `out`, shorter than
            `limit`, is too small; FALL_BACK if the block takes `limit` bytes or more, or cannot be predicted.
        """
        coder = self._devices.coder_for(block)
        if coder is not None:
            from kvstore.codecs.predictive.kernels.blocks import encode_together

            with self._devices.watched(coder):
                return block, encode_together(coder, info, block, out, limit)
        view = block if block.on_cpu else copy_on_cpu(block)
        return view, self._encode_on_cpu(info, view, out, limit)

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        """Decode a block of the model's layout whose sizes were checked; see `Codec.decode`."""
        coder = self._devices.coder_for(out)
        if coder is not None:
            from kvstore.codecs.predictive.kernels.blocks import decode_together

            with self._devices.watched(coder):
                if not decode_together(coder, info, payload, layer_sizes, out):
                    raise CodecError("predictive: the block is damaged, or the profile is another one")
                return
        target = out if out.on_cpu else buffer_on_cpu(out)
        wrong = self._decode_on_cpu(info, payload, layer_sizes, target)
        if wrong is not None:
            raise CodecError(wrong)
        if target is not out:
            target.copy_to(out)
            wait_for(out.devices)

    def codes_on(self, device: torch.device) -> bool:
        """Return whether tensors on `device` (a GPU with its index) are coded there; see `Devices.coder`."""
        return self._devices.coder(device) is not None

    def codes_blocks_like(self, block: KVView) -> bool:
        """Return whether kernels code this block on the device that holds it."""
        return self._devices.coder_for(block) is not None

    @abstractmethod
    def in_order(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> InOrder | None:
        """Return what decodes a block into `out`, on the CPU, layer after layer; None if it can only be decoded whole.

        Raises:
            CodecError: the block is damaged.
        """

    @abstractmethod
    def _encode_on_cpu(
        self, info: BlockInfo, block: KVView, out: memoryview, limit: int
    ) -> tuple[int, ...] | int | None:
        """As `encode`, of a block on the CPU."""

    @abstractmethod
    def _decode_on_cpu(
        self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView
    ) -> str | None:
        """As `decode`, into a block on the CPU. Returns what is damaged."""

    @abstractmethod
    def _tried(self, device: torch.device) -> Loaded | None:
        """See the trial of `Devices`."""
