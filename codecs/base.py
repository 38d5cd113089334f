"""What a codec is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvstore.codecs.profile import NO_PROFILE
from kvstore.codecs.view import KVView
from kvstore.core.layout import KVLayout
from kvstore.core.tokens import Tokens
from kvstore.errors import CodecError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class BlockInfo:
    """What is known of a block besides its keys and values: layout, its token ids `[n]`, position of the first."""

    layout: KVLayout
    tokens: Tokens
    start: int

    @property
    def count(self) -> int:
        return len(self.tokens)

    def layer_bytes(self) -> list[int]:
        """Raw bytes of each layer of this block."""
        item = self.layout.item_bytes * self.count
        return [x.heads * (x.key_dim + x.value_dim) * item for x in self.layout.layers]


class Codec(Protocol):
    """Codes the layers of a block one by one. Stateless and thread-safe.

    `id` is a number forever: a codec whose bytes change gets a new one. `exact` codecs give back every bit. `profile`
    is the id of the profile (see profile.py) that decoding needs, zeros for none. `has_kernels`: there are kernels that
    code tensors where they are, on the devices for which `codes_on` is true; elsewhere the CPU codes a copy, which
    takes longer and is counted.
    """

    id: int
    name: str
    exact: bool
    profile: bytes = NO_PROFILE
    has_kernels: bool = False

    def bound(self, info: BlockInfo) -> int:
        """The most payload bytes that `encode` may write for such a block."""

    def usual(self, info: BlockInfo) -> int:
        """About how many payload bytes such a block takes, rather too many than too few; at most `bound`."""
        return self.bound(info)

    def encode(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | None:
        """Writes the layers one after the other into `out` (writable), which it mutates.

        Returns the coded bytes of each layer; None where `out`, shorter than `bound`, did not do. The same input gives
        the same bytes on every machine.
        """

    def fallbacks(self, payload: memoryview, layer_sizes: Sequence[int]) -> int:
        """How many parts of what `encode` wrote are as they were given, for coding did not make them smaller."""
        return 0

    def error_bound(self, payload: memoryview, layer_sizes: Sequence[int]) -> float:
        """What no value's error exceeds in what `encode` wrote; of a codec that is not exact, 0 says that no bound is
        known."""
        return 0.0

    def codes_on(self, device: torch.device, dtype: str) -> bool:
        """Whether tensors of `dtype` on `device` (a GPU with its index) are encoded and decoded there. May be slow once
        for each device, while kernels are compiled and tried; may turn false when a device fails."""
        return False

    def kernels_decode(self, payload: memoryview, layer_sizes: Sequence[int]) -> bool:
        """Whether the kernels can decode what `encode` wrote here. Blocks of some modes are for the CPU."""
        return self.has_kernels

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        """Decodes the first `out.tokens` tokens of the block into `out`, which may be strided; mutates only that.

        payload: the coded layers one after the other, layer_sizes: the bytes of each. Raises `CodecError` where they
        are not what `encode` wrote; `out` then holds undefined values. Sizes are checked before memory is taken.
        """


def check_payload(info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
    """The checks that every decoder starts with."""
    if len(layer_sizes) != len(info.layout.layers):
        raise CodecError(f"expected {len(info.layout.layers)} layers, found {len(layer_sizes)}")
    if sum(layer_sizes) != len(payload):
        raise CodecError(f"layers of {sum(layer_sizes)} bytes in a payload of {len(payload)}")
    if out.layout != info.layout or not 0 < out.tokens <= info.count:
        raise CodecError(f"a block of {info.count} tokens cannot be decoded into a view of {out.tokens}")
