"""What the exact modes of the predictive codec share: a block is coded on the device that holds it, or on the CPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.codecs.base import BlockInfo
from kvstore.codecs.device import buffer_on_cpu, copy_on_cpu, wait_for
from kvstore.codecs.predictive.on_device import Devices
from kvstore.codecs.together import Together
from kvstore.codecs.view import KVView
from kvstore.core.layout import KVLayout
from kvstore.errors import CodecError

if TYPE_CHECKING:
    import torch

    from kvstore.codecs.predictive.kernels.blocks import Loaded

# A stream of rANS keeps one warp busy, whose steps wait for each other: so many blocks take little longer than one.
MOST_TOGETHER = 64


class DeviceMode(ABC):
    """Codes blocks of a model's layout, on the device that holds them or on the CPU. Thread-safe.

    Blocks that several threads code on a device at the same time are coded there in one call. A subclass says what the
    CPU does, and how its model gets on a device.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._devices: Devices[Loaded] = Devices(layout, self._tried)
        self._encoding: Together[ToEncode, tuple[int, ...] | int | None] = Together(_encode_all, MOST_TOGETHER)
        self._decoding: Together[ToDecode, bool] = Together(_decode_all, MOST_TOGETHER)

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
            from kvstore.codecs.splitzip.kernels.blocks import after_caller

            with self._devices.watched(coder):
                after_caller(coder.device)
                return block, self._encoding(ToEncode(coder, info, block, out, limit))
        view = block if block.on_cpu else copy_on_cpu(block)
        return view, self._encode_on_cpu(info, view, out, limit)

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        """Decode a block of the model's layout whose sizes were checked; see `Codec.decode`."""
        coder = self._devices.coder_for(out)
        if coder is not None:
            from kvstore.codecs.splitzip.kernels.blocks import after_caller

            with self._devices.watched(coder):
                after_caller(coder.device)
                if not self._decoding(ToDecode(coder, info, payload, layer_sizes, out)):
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


@dataclass(frozen=True, eq=False)
class ToEncode:
    """A block that a device is to encode into `out`; see `kernels.blocks.encode_into`."""

    coder: Loaded
    info: BlockInfo
    block: KVView
    out: memoryview
    limit: int


@dataclass(frozen=True, eq=False)
class ToDecode:
    """A block that a device is to decode into `out`."""

    coder: Loaded
    info: BlockInfo
    payload: memoryview
    layer_sizes: Sequence[int]
    out: KVView


def _encode_all(items: Sequence[ToEncode]) -> list[tuple[int, ...] | int | None]:
    from kvstore.codecs.predictive.kernels import blocks

    found: dict[int, tuple[int, ...] | int | None] = {}
    for coder, numbers in _by_coder(items):
        these = [items[i] for i in numbers]
        sizes = blocks.encode_all(coder, [(of.info, of.block, of.out, of.limit) for of in these])
        found |= dict(zip(numbers, sizes, strict=True))
    return [found[i] for i in range(len(items))]


def _decode_all(items: Sequence[ToDecode]) -> list[bool]:
    """Whether each is sound."""
    from kvstore.codecs.predictive.kernels import blocks

    sound = [True] * len(items)
    for coder, numbers in _by_coder(items):
        these = [items[i] for i in numbers]
        infos, payloads, sizes = ([getattr(of, name) for of in these] for name in ("info", "payload", "layer_sizes"))
        for bad in blocks.decode_from(coder, infos, payloads, sizes, [of.out for of in these]):
            sound[numbers[bad]] = False
    return sound


def _by_coder(items: Sequence[ToEncode | ToDecode]) -> list[tuple[Loaded, list[int]]]:
    """The models, each on a device of its own, with the numbers of their items."""
    coders: dict[int, tuple[Loaded, list[int]]] = {}
    for number, item in enumerate(items):
        coders.setdefault(id(item.coder), (item.coder, []))[1].append(number)
    return list(coders.values())
