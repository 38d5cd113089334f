"""Codec 7: values at their entropy. What is left of one without the mean exponent and sign of its channel, by rANS.

A channel (one of the `dim` columns of a head) has values of like size and often of one sign. Per block and channel one
byte says the mean exponent, the prevailing sign, and which of 16 shipped distributions fits best; sign, exponent and
the two highest mantissa bits of a value are then one symbol, the lower bits are kept as they are: 5 of bf16, 21 of
fp32 (those that were always zero are left out), 8 of fp16, none of E5M2, one of E4M3. Nothing has to be calibrated.
Layers that this makes no smaller are coded as by splitzip. docs/codecs/entropy.md has the reasons and figures,
FORMAT.md the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import kvstore.codecs._native as _native
from kvstore.codecs.base import BlockInfo, Codec, CodedBlock, LayersOfBlocks
from kvstore.codecs.entropy.tables import tables
from kvstore.codecs.splitzip.codec import decode_block, encode_block, layers_of_blocks, raw_chunks
from kvstore.codecs.tensor_memory import row_shapes
from kvstore.codecs.view import KVView


class EntropyCodec(Codec):
    """Makes bf16 about 1.55 times smaller, at a fifth of splitzip's speed. Needs no profile. Thread-safe.

    fp32 becomes 1.22 times smaller (3.1 times where it holds what was bf16), fp16 1.20, E5M2 1.50, E4M3 1.27 times.

    Example:
        >>> import numpy as np, torch
        >>> from kvstore import KVLayout
        >>> layout = KVLayout.uniform(num_layers=1, heads=2, head_dim=64)
        >>> k, v = torch.randn(2, 2, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        >>> info = BlockInfo(layout, np.arange(64, dtype=np.uint32), start=0)
        >>> codec = EntropyCodec()
        >>> out = memoryview(bytearray(codec.bound(info)))
        >>> (size,) = codec.encode(info, KVView.of_layers(layout, [(k, v)]), out)
        >>> 1.4 < info.layer_bytes()[0] / size < 1.6
        True
    """

    id = 7
    name = "entropy"
    takes_donors = True
    codes_states = True
    exact = True
    layers_apart = True

    def bound(self, info: BlockInfo) -> int:
        return _native.bounds(info.layout.dtype, *row_shapes(info.layout), info.count, True)[0]

    def usual(self, info: BlockInfo) -> int:
        return _native.bounds(info.layout.dtype, *row_shapes(info.layout), info.count, True)[1]

    def encode(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | None:
        return encode_block(info, block, out, _model())

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        decode_block(info, payload, layer_sizes, out, _model())

    def by_layers(self, blocks: Sequence[CodedBlock], out: KVView) -> LayersOfBlocks:
        return layers_of_blocks(blocks, out, _model())

    def fallbacks(self, payload: memoryview, layer_sizes: Sequence[int]) -> int:
        return raw_chunks(payload, layer_sizes)


@lru_cache(maxsize=1)
def _model() -> _native.EntropyModel:
    return _native.EntropyModel(*tables())
