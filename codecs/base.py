"""What a codec is: the contract, what it is told of a block, and the checks that every decoder starts with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from kvstore.codecs.profile import NO_PROFILE
from kvstore.codecs.view import KVView
from kvstore.core.layout import KVLayout
from kvstore.core.tokens import Tokens
from kvstore.errors import CodecError

if TYPE_CHECKING:
    import torch

    from kvstore.codecs.in_order import InOrder


@dataclass(frozen=True)
class BlockInfo:
    """What a codec knows of a block besides its keys and values. Immutable.

    Attributes:
        layout: the shapes and dtype of the block.
        tokens: its token ids, uint32 `[n]`.
        start: position of the first token in its sequence.
        cut: length of the cache that it was taken from, if layers with windows lack some of its tokens; else 0.
        state_bytes: bytes of the states at its end; 0 if it has none.

    Example:
        >>> import numpy as np
        >>> layout = KVLayout.uniform(num_layers=2, heads=4, head_dim=16)
        >>> info = BlockInfo(layout, np.array([7, 8, 9], np.uint32), start=64)
        >>> info.count, info.layer_bytes()
        (3, [768, 768])
    """

    layout: KVLayout
    tokens: Tokens
    start: int
    cut: int = 0
    state_bytes: int = 0

    @property
    def count(self) -> int:
        """How many tokens the block has."""
        return len(self.tokens)

    def layer_bytes(self) -> list[int]:
        """Return the raw bytes of each layer of this block, K and V together."""
        count = self.count
        return [nbytes * count for nbytes in _token_bytes(self.layout)]


@lru_cache(maxsize=64)
def _token_bytes(layout: KVLayout) -> tuple[int, ...]:
    """Raw bytes of a token in each layer."""
    return tuple(x.heads * (x.key_dim + x.value_dim) * layout.item_bytes for x in layout.layers)


@dataclass(frozen=True)
class CodedBlock:
    """A block that is decoded layer by layer, and where it goes.

    Attributes:
        info: what is known of it.
        payload, layer_sizes: as for `Codec.decode`.
        at: the token of the target where it begins.
        wanted: how many of its tokens are decoded.
    """

    info: BlockInfo
    payload: memoryview
    layer_sizes: Sequence[int]
    at: int
    wanted: int


LayersOfBlocks = Callable[[range, range], list[int]]
"""Decodes these layers of the blocks of these numbers, and returns the numbers of those that are damaged there, whose
memory then holds undefined values. Thread-safe for calls that have no layer of a block in common."""


class Codec(Protocol):
    """Codes the layers of a block one by one. Stateless and thread-safe.

    Attributes:
        id: number of the codec, written to disk. A codec whose bytes change gets a new number.
        name: what settings call it.
        exact: whether `decode` gives back every bit.
        profile: id of the profile that decoding needs (see profile.py); zeros if it needs none.
        has_kernels: whether it can code tensors on the device that holds them, if `codes_on` is true for that device.
            Elsewhere the CPU codes a copy. That takes longer, and is counted.
        takes_donors: whether a tier with this codec may code blocks against donors too. For codecs that are chosen for
            the size of what they write: a block with donors takes longer to read.
        layers_apart: whether each layer decodes without the others: `decode` then takes any consecutive layers of a
            payload, with the layout of those alone.
        codes_states: whether the states of blocks are coded, too (state_chunk.py): for such codecs, again.
        copies: whether coding is no more than copying.

    Example:
        >>> from kvstore.codecs import codec_by_name
        >>> codec = codec_by_name("splitzip")
        >>> codec.id, codec.exact
        (1, True)
    """

    id: int
    name: str
    exact: bool
    profile: bytes = NO_PROFILE
    has_kernels: bool = False
    takes_donors: bool = False
    codes_states: bool = False
    layers_apart: bool = False
    copies: bool = False

    def bound(self, info: BlockInfo) -> int:
        """Return the most payload bytes that `encode` can write for such a block."""

    def usual(self, info: BlockInfo) -> int:
        """Return about how many payload bytes such a block takes: rather too many than too few, at most `bound`."""
        return self.bound(info)

    def encode(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | None:
        """Write the layers one after the other into `out`. The same input gives the same bytes on every machine.

        Args:
            info: what is known of the block.
            block: its keys and values, on any device.
            out: writable memory, which is mutated. `bound(info)` bytes are always enough.

        Returns:
            The coded bytes of each layer. None if `out` is too small.
        """

    def fallbacks(self, payload: memoryview, layer_sizes: Sequence[int]) -> int:
        """Return how many parts of what `encode` wrote are stored raw, because coding did not make them smaller."""
        return 0

    def error_bound(self, payload: memoryview, layer_sizes: Sequence[int]) -> float:
        """Return the largest error of a value in what `encode` wrote. For a lossy codec, 0 means that it is unknown."""
        return 0.0

    def codes_on(self, device: torch.device, dtype: str) -> bool:
        """Return whether tensors of `dtype` on `device` are encoded and decoded there.

        The first call for a device may be slow, because kernels are compiled and tried. The answer may become false
        when a device fails.

        Args:
            device: a GPU with its index.
            dtype: a name in `ITEM_BYTES`.
        """
        return False

    @property
    def reads_by_kernels(self) -> bool:
        """Whether it has kernels that decode what it usually writes."""
        return self.has_kernels

    def reads_on(self, device: torch.device, dtype: str) -> bool:
        """Return whether what it usually writes is decoded on `device`; as `codes_on`, of decoding alone."""
        return self.codes_on(device, dtype)

    def kernels_decode(self, payload: memoryview, layer_sizes: Sequence[int]) -> bool:
        """Return whether the kernels can decode what `encode` wrote. The CPU alone decodes blocks of some modes."""
        return self.has_kernels

    def decodes_on(self, device: torch.device, dtype: str, payload: memoryview, layer_sizes: Sequence[int]) -> bool:
        """Return whether what `encode` wrote is decoded on `device`, for a payload that kernels can decode.

        As `codes_on`, but for codecs whose modes have kernels of their own, of the mode of this payload alone.
        """
        return self.codes_on(device, dtype)

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        """Decode the first `out.tokens` tokens of the block into `out`.

        Args:
            info: what is known of the block.
            payload: the coded layers one after the other. It may hold anything; sizes are checked before memory is
                taken.
            layer_sizes: the bytes of each layer.
            out: where the tensors go, on any device, any strides of heads and tokens. Nothing else is mutated.

        Raises:
            CodecError: `payload` and `layer_sizes` are not what `encode` wrote. `out` then holds undefined values.
            ValueError: the last dimension of a tensor of `out` is not contiguous.
        """

    def in_order(self, block: CodedBlock, out: KVView) -> InOrder | None:
        """Return what decodes the layers of a block one after the other: for codecs whose layers need those before.

        Args:
            block: of this codec. The owner of its payload must be kept as long as anything is decoded.
            out: all layers of its cache, on the CPU.

        Returns:
            None if this block can only be decoded whole.

        Raises:
            CodecError: the block is damaged.
        """
        return None

    def by_layers(self, blocks: Sequence[CodedBlock], out: KVView) -> LayersOfBlocks:
        """Return what decodes some layers of some of these blocks into `out`: for codecs with their layers apart.

        Args:
            blocks: of this codec, each of which `decode_layers` has decoded a layer of. The owners of their payloads
                must be kept as long as anything is decoded.
            out: all layers of their cache, on the CPU.
        """

        def decode(layers: range, numbers: range) -> list[int]:
            bad = []
            for number in numbers:
                try:
                    decode_layers(self, blocks[number], out, layers)
                except CodecError:
                    bad.append(number)
            return bad

        return decode


def decode_layers(codec: Codec, block: CodedBlock, out: KVView, layers: range) -> None:
    """Decode some layers of a block whose codec has its layers apart into `out`, which has all layers.

    Raises:
        CodecError: the block is damaged.
    """
    info, sizes = block.info, block.layer_sizes
    if len(sizes) != len(out.layout.layers) or sum(sizes) != len(block.payload):
        raise CodecError(f"{codec.name}: the sizes of the layers do not fit the payload, or the layout")
    part, wanted = out.layers(layers).narrow(block.at, block.wanted), sizes[layers.start : layers.stop]
    begin = sum(sizes[: layers.start])
    own = BlockInfo(part.layout, info.tokens, info.start, info.cut)
    codec.decode(own, block.payload[begin : begin + sum(wanted)], wanted, part)


def check_payload(codec: str, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
    """Check the arguments of `Codec.decode`, as every decoder does first. `codec` is its name, for messages.

    Raises:
        CodecError: the sizes do not fit the payload or the layout, or `out` does not fit the block.
        ValueError: `out` cannot be written to.
    """
    if len(layer_sizes) != info.layout.sections:
        raise CodecError(f"{codec}: expected {info.layout.sections} layers, found the sizes of {len(layer_sizes)}")
    if min(layer_sizes) < 0:
        raise CodecError(f"{codec}: layer sizes must not be negative, found {list(layer_sizes)}")
    if sum(layer_sizes) != len(payload):
        raise CodecError(f"{codec}: the layers take {sum(layer_sizes)} bytes, but the payload has {len(payload)}")
    if out.layout != info.layout:
        raise CodecError(f"{codec}: the target has another layout than the block; make it with the block's layout")
    if not 0 < out.tokens <= info.count:
        raise CodecError(f"{codec}: the target must have 1 to {info.count} tokens, as the block, found {out.tokens}")
    if not out.writable:
        raise ValueError(
            f"{codec}: the last dimension of every tensor of the target must be contiguous; decode into contiguous "
            "tensors and copy"
        )
