"""A layer of the entropy codec in plain numpy: what the fast twins are compared with (FORMAT.md, "entropy").

A *head* is `[tokens, dim]` bf16 values as uint16. Layers that this makes no smaller are splitzip's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvstore.codecs.entropy import tables as spec
from kvstore.codecs.rans.coder import RansTables
from kvstore.errors import CodecError

Head = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]

HEADER = struct.Struct("<IIII")  # mode, bytes of the stream, escapes, zero
MODE_ENTROPY = 2
LOW_BITS = 5  # mantissa bits that are kept as they are
MOST_UNIT = 4


@lru_cache(maxsize=1)
def coder() -> RansTables:
    return RansTables(spec.tables()[0].reshape(-1, spec.SYMBOLS), spec.PROB_BITS)


def low_planes(low: Bytes) -> bytes:
    """5-bit values: two halves of the run share bytes of 4 bits, eight eighths share bytes of 1 bit."""
    half, eighth = -(-len(low) // 2), -(-len(low) // 8)
    nibbles = np.zeros((2, half), np.uint8)
    nibbles.ravel()[: len(low)] = low & 15
    bits = np.zeros((8, eighth), np.uint8)
    bits.ravel()[: len(low)] = low >> 4
    packed: bytes = (nibbles[0] | nibbles[1] << 4).tobytes()
    return packed + np.packbits(bits, axis=0, bitorder="little").tobytes()


def join_low(planes: Bytes, count: int) -> Bytes:
    """The inverse of `low_planes`."""
    half = -(-count // 2)
    nibbles = np.concatenate([planes[:half] & 15, planes[:half] >> 4])[:count]
    bits = np.unpackbits(planes[half:][None, :], axis=0, bitorder="little").reshape(-1)[:count]
    joined: Bytes = nibbles | bits << 4
    return joined


def planes_bytes(count: int) -> int:
    return -(-count // 2) + -(-count // 8)


def unit_of(anchor: npt.NDArray[np.int64]) -> int:
    """In what steps a head's mean exponents are told: 3 bits must do for all that are not far below the largest."""
    below = int(anchor.max()) - anchor
    most = int(below[below <= 7 * MOST_UNIT].max())
    return max(1, -(-most // 7))


def encode_layer(keys: Sequence[Head], values: Sequence[Head]) -> bytes:
    """One layer, in mode 2 whatever it takes."""
    freqs, costs = spec.tables()
    tops, channels, planes = b"", b"", b""
    symbols: list[Bytes] = []
    classes: list[Bytes] = []
    escaped: list[Head] = []
    for kind, heads in enumerate((keys, values)):
        for head in heads:
            tokens = len(head)
            wide = head.astype(np.int64)
            exponent, sign = (wide >> 7) & 0xFF, wide >> 15
            anchor = (exponent.sum(axis=0) + tokens // 2) // tokens
            flip = 2 * sign.sum(axis=0) > tokens
            top, unit = int(anchor.max()), unit_of(anchor)
            delta = np.minimum((top - anchor + unit // 2) // unit, 7)
            relative = top - delta * unit + spec.ABOVE - exponent
            symbol = ((sign ^ flip) * spec.RELATIVE + relative) << spec.MANTISSA_BITS | ((wide >> LOW_BITS) & 3)
            outside = (exponent == 0) | (relative < 0) | (relative >= spec.RELATIVE)
            symbol = np.where(outside, spec.ESCAPE, symbol)
            step = -(-tokens // spec.MOST_SAMPLES)
            cost = costs[kind].astype(np.int64)[:, symbol[::step]].sum(axis=1)  # [classes, dim]
            chosen = cost.argmin(axis=0)
            symbol = np.where(freqs[kind][chosen[None, :], symbol] > 0, symbol, spec.ESCAPE)
            tops += bytes([top, unit])
            channels += (flip.astype(np.int64) << 7 | delta << 4 | chosen).astype(np.uint8).tobytes()
            planes += low_planes((head.ravel() & ((1 << LOW_BITS) - 1)).astype(np.uint8))
            escaped.append(head.ravel()[symbol.ravel() == spec.ESCAPE])
            symbols.append(symbol.ravel().astype(np.uint8))
            classes.append(np.tile((chosen + spec.CLASSES * kind).astype(np.uint8), tokens))
    stream = coder().encode(np.concatenate(symbols), np.concatenate(classes))
    escapes = np.concatenate(escaped)
    header = HEADER.pack(MODE_ENTROPY, len(stream), len(escapes), 0)
    return header + tops + channels + planes + escapes.astype("<u2").tobytes() + stream


def decode_layer(payload: bytes, shape: tuple[int, int, int, int], tokens: int) -> tuple[list[Head], list[Head]]:
    """shape: heads of keys, dim of keys, heads of values, dim of values. Raises `CodecError`."""
    key_heads, key_dim, value_heads, value_dim = shape
    dims = [key_dim] * key_heads + [value_dim] * value_heads
    fixed = HEADER.size + 2 * len(dims) + sum(dim + planes_bytes(tokens * dim) for dim in dims)
    if len(payload) < fixed:
        raise CodecError("entropy: a layer is too short for its values")
    mode, stream_bytes, escapes, zero = HEADER.unpack_from(payload)
    if mode != MODE_ENTROPY or zero or len(payload) != fixed + 2 * escapes + stream_bytes:
        raise CodecError("entropy: the header of a layer does not fit it")
    memory = np.frombuffer(payload, np.uint8)
    at = HEADER.size + 2 * len(dims)
    tops = memory[HEADER.size : at].astype(np.int64).reshape(-1, 2)
    flips, deltas, classes = [], [], []
    for number, dim in enumerate(dims):
        channel = memory[at : at + dim]
        deltas.append((channel >> 4) & 7)
        flips.append(channel >> 7)
        own = (channel & 15) + np.uint8(spec.CLASSES if number >= key_heads else 0)
        classes.append(np.tile(own, tokens))
        at += dim
    lows = []
    for dim in dims:
        lows.append(join_low(memory[at : at + planes_bytes(tokens * dim)], tokens * dim))
        at += planes_bytes(tokens * dim)
    listed = np.frombuffer(payload, "<u2", escapes, at)
    symbols = coder().decode(memory[at + 2 * escapes :], tokens * sum(dims), np.concatenate(classes))
    if int((symbols == spec.ESCAPE).sum()) != escapes:
        raise CodecError("entropy: a layer has escapes that belong to no symbol")
    heads, first, used = [], 0, 0
    for number, dim in enumerate(dims):
        symbol = symbols[first : first + tokens * dim].reshape(tokens, dim).astype(np.int64)
        first += tokens * dim
        sign = symbol >= spec.RELATIVE << spec.MANTISSA_BITS
        rest = symbol - sign * (spec.RELATIVE << spec.MANTISSA_BITS)
        top, unit = tops[number].tolist()
        exponent = top - deltas[number].astype(np.int64) * unit + spec.ABOVE - (rest >> spec.MANTISSA_BITS)
        value = (sign ^ flips[number].astype(bool)).astype(np.int64) << 15 | (exponent & 0xFF) << 7
        value |= (rest & 3) << LOW_BITS | lows[number].reshape(tokens, dim)
        head = value.astype(np.uint16).ravel()
        is_escape = symbol.ravel() == spec.ESCAPE
        head[is_escape] = listed[used : used + int(is_escape.sum())]
        used += int(is_escape.sum())
        heads.append(head.reshape(tokens, dim))
    return heads[:key_heads], heads[key_heads:]
