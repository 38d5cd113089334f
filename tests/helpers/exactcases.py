"""What holds for the exact modes of the predictive codec, of every dtype: their twins in C++, and the codec as the
store sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from codeccontract import decode, encode
from codertwins import needs_exactly
from cpulevels import cpu_levels
from kvcases import random_kv, same_kv
from predictcases import Block, decoded, encoded, longs, native, same, same_longs, view_of
from profilecases import ROPE, Layers, predicted_kv, profile_of

from kvstore import KVLayout
from kvstore.codecs import BlockInfo, codec_by_name
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.predictive import _predict
from kvstore.codecs.predictive.codec import EXACT_MODES
from kvstore.codecs.predictive.model import PredictiveModel


def twins_agree(
    model: PredictiveModel,
    tokens: np.ndarray,
    start: int,
    block: Block,
    want: list[bytes],
    wanted: int,
    dtype: str = "bfloat16",
) -> None:
    """Every twin writes the layers that are wanted of a block, and reads them, and the first `wanted` tokens alone."""
    coder, view = native(model), view_of(model, block, dtype)
    for level in cpu_levels():
        assert encoded(coder, tokens, start, view, level, dtype) == want
        assert same(decoded(model, coder, tokens, start, want, level, dtype=dtype), block)
        assert same(decoded(model, coder, tokens, start, want, level, wanted, dtype), block, wanted)


def agrees_with_twins(
    reference: ModuleType, model: PredictiveModel, dtype: str, tokens: np.ndarray, block: Block, wanted: int
) -> list[bytes]:
    """The reference of a mode writes what every twin writes, and decodes it; returns the layers."""
    ids = torch.from_numpy(tokens)
    layers: list[bytes] = reference.encode(model, dtype, ids, 3, longs(block))
    twins_agree(model, tokens, 3, block, layers, wanted, dtype)
    assert same_longs(reference.decode(model, dtype, ids, 3, layers), longs(block))
    return layers


def coded(
    model: PredictiveModel, dtype: str, tokens: np.ndarray, block: Block
) -> tuple[list[bytes], Callable[[list[bytes], str], Block]]:
    """The layers of a block, and how a twin decodes layers of its tokens."""
    coder = native(model)
    layers = encoded(coder, tokens, 3, view_of(model, block, dtype), cpu_levels()[-1], dtype)
    return layers, partial(decoded, model, coder, tokens, 3, dtype=dtype)


def keeps_to_room_and_limit(model: PredictiveModel, dtype: str, tokens: np.ndarray, block: Block) -> None:
    size, view = sum(map(len, coded(model, dtype, tokens, block)[0])), view_of(model, block, dtype)
    code = partial(_predict.encode, native(model), tokens, 3, view.rows, dtype=dtype)
    needs_exactly(size, code, _predict.FALL_BACK)


def codec_and_block(dtype: str) -> tuple[Any, BlockInfo, Layers]:
    """A codec of a profile of this dtype, and keys and values, in bf16 still, that it predicts."""
    layout = KVLayout.uniform(3, 2, 16, dtype, ROPE)
    info = BlockInfo(layout, np.arange(37, dtype=np.uint32), 0)
    near = predicted_kv(profile_of(replace(layout, dtype="bfloat16"), "lossless"), info.tokens, 0)
    return codec_by_name("predictive", profile_of(layout, "lossless")), info, near


def predicts(codec: Any, info: BlockInfo, kv: Layers) -> bytes:
    """The codec predicts the block, on the CPU alone, and decodes it bit for bit; returns the payload."""
    dtype = info.layout.dtype
    payload, sizes = encode(codec, info, kv)
    assert payload[0] == EXACT_MODES[dtype]
    assert codec.fallbacks(memoryview(payload), sizes) == 0
    assert not codec.kernels_decode(memoryview(payload), sizes)
    assert not codec.codes_on(torch.device("cuda", 0), dtype)
    assert not codec.has_kernels
    assert codec.usual(info) <= codec.bound(info)
    for wanted in (1, 20, 37):
        assert same_kv(decode(codec, info, payload, sizes, wanted), kv, wanted)
    return payload


def codes_the_rest_as_entropy_does(codec: Any, info: BlockInfo, kv: Layers) -> None:
    """So it does with any bits, and with a layout whose keys it cannot rotate; it counts the layers."""
    other = BlockInfo(replace(info.layout, rope="none"), info.tokens, 0)
    for block, given in ((info, random_kv(37, info.layout)), (other, kv)):
        payload, sizes = encode(codec, block, given)
        assert payload == encode(EntropyCodec(), block, given)[0]
        assert codec.fallbacks(memoryview(payload), sizes) == 3
