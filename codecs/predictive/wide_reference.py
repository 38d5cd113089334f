"""The lossless mode for fp32 and fp16 as a plain program: what csrc/predictive/wide.h must equal.

The words of a block (codecs/words.py) are coded as the values of a bf16 block are, by reference.py; what words leave
out of values stands before each layer. FORMAT.md says it in words.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvstore.codecs.predictive import reference
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.codecs.words import KEPT_BITS
from kvstore.errors import CodecError

HEADER = struct.Struct("<BBH")  # mode, bytes of lower halves that are kept, zero
MODES = {"float32": 12, "float16": 13}

Tensor = torch.Tensor
Bytes = npt.NDArray[np.uint8]


def word(values: Tensor, dtype: str) -> Tensor:
    """values: their bits, int64."""
    if dtype == "float32":
        return values >> 16
    return values >> 15 << 15 | ((values >> 10 & 31) + 112) << 7 | (values & 1023) >> 3


def value(words: Tensor, low: Tensor, dtype: str) -> Tensor:
    """The inverse. low: what the words leave out: of fp32 the lower half, of fp16 the 3 lowest bits."""
    if dtype == "float32":
        return words << 16 | low
    return words >> 15 << 15 | ((words >> 7) - 112 & 31) << 10 | (words & 127) << 3 | low


def lower_bytes(pair: Sequence[Tensor], dtype: str) -> int:
    """How many bytes of the lower halves of fp32, from their top, are not 0 throughout."""
    if dtype != "float32":
        return 0
    found = int(np.bitwise_or.reduce(torch.cat([x.flatten() for x in pair]).numpy()))
    return 2 if found & 0xFF else 1 if found & 0xFF00 else 0


def kept_bytes(count: int, dtype: str, lower: int) -> int:
    return lower * count if dtype == "float32" else KEPT_BITS[dtype] * -(-count // 8)


def keep(values: Tensor, dtype: str, lower: int) -> bytes:
    """What words leave out of the values of a part."""
    flat = values.flatten().numpy()
    if dtype == "float32":
        return {0: b"", 1: (flat >> 8 & 0xFF).astype("u1").tobytes(), 2: (flat & 0xFFFF).astype("<u2").tobytes()}[lower]
    planes = []
    for plane in range(KEPT_BITS[dtype]):
        bits = np.zeros((8, -(-len(flat) // 8)), np.uint8)
        bits.ravel()[: len(flat)] = flat >> plane & 1
        planes.append(np.packbits(bits, axis=0, bitorder="little").tobytes())
    return b"".join(planes)


def kept(data: bytes, count: int, dtype: str, lower: int) -> Tensor:
    """The inverse: `low` of `value`, int64 [count]."""
    found = np.zeros(count, np.int64)
    if dtype == "float32":
        if lower:
            found = np.frombuffer(data, f"<u{lower}").astype(np.int64) << (8 * (2 - lower))
        return torch.from_numpy(found)
    for plane, bits in enumerate(np.frombuffer(data, np.uint8).reshape(KEPT_BITS[dtype], -1)):
        found |= np.unpackbits(bits[None, :], axis=0, bitorder="little").reshape(-1)[:count].astype(np.int64) << plane
    return torch.from_numpy(found)


def encode(
    model: PredictiveModel, dtype: str, tokens: Tensor, start: int, block: Sequence[tuple[Tensor, Tensor]]
) -> list[bytes]:
    """The coded layers. block: bits of fp32 or fp16, K and V of each layer, int64 [n, C]."""
    inner = reference.encode(model, tokens, start, [(word(k, dtype), word(v, dtype)) for k, v in block])
    layers = []
    for pair, coded in zip(block, inner, strict=True):
        lower = lower_bytes(pair, dtype)
        low = b"".join(keep(values, dtype, lower) for values in pair)
        layers.append(HEADER.pack(MODES[dtype], lower, 0) + low + coded)
    return layers


def decode(
    model: PredictiveModel, dtype: str, tokens: Tensor, start: int, layers: Sequence[bytes]
) -> list[tuple[Tensor, Tensor]]:
    """The inverse; `CodecError` unless the layers are what `encode` wrote."""
    lows, inner = [], []
    for number, data in enumerate(layers):
        if len(data) < HEADER.size:
            raise CodecError("predictive: a layer is too short for its header")
        mode, lower, zero = HEADER.unpack_from(data)
        if mode != MODES[dtype] or zero or lower > (2 if dtype == "float32" else 0):
            raise CodecError("predictive: the header of a layer does not fit its dtype")
        counts = [len(tokens) * part.width for part in model.parts[number]]
        sizes = [kept_bytes(count, dtype, lower) for count in counts]
        if len(data) < HEADER.size + sum(sizes):
            raise CodecError("predictive: a layer is too short for its values")
        middle, end = HEADER.size + sizes[0], HEADER.size + sum(sizes)
        first, second = data[HEADER.size : middle], data[middle:end]
        lows.append((kept(first, counts[0], dtype, lower), kept(second, counts[1], dtype, lower)))
        inner.append(data[end:])
    words = reference.decode(model, tokens, start, inner)
    return [
        (value(k, low_k.view(k.shape), dtype), value(v, low_v.view(v.shape), dtype))
        for (k, v), (low_k, low_v) in zip(words, lows, strict=True)
    ]
