"""A layer of the entropy codec in plain numpy: what the fast twins are compared with (FORMAT.md, "entropy").

A *head* is `[tokens, dim]` values as unsigned integers. Each has a *word*, which is coded as a bf16 is, and low bits,
which are kept as they are. Layers that this makes no smaller are splitzip's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.codecs.entropy import tables as spec
from kvstore.codecs.rans.coder import RansTables
from kvstore.errors import CodecError

Head = npt.NDArray[np.unsignedinteger[Any]]
Words = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Form:
    """How values of a dtype meet the coder. bias: what is added to exponents so that they count as a bf16's."""

    mode: int
    item: int
    escape: int  # bytes of a value, from its top, that an escape lists
    exponent: int = 8
    mantissa: int = 7
    bias: int = 0


FORMS = {
    "bfloat16": Form(2, 2, 2),
    "float32": Form(8, 4, 2, mantissa=23),
    "float16": Form(9, 2, 2, 5, 10, 112),
    "float8_e5m2": Form(10, 1, 1, 5, 2, 112),
    "float8_e4m3fn": Form(11, 1, 1, 4, 3, 120),
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
HEADER = struct.Struct("<BBHIII")  # mode, lower bytes that are kept of fp32, zero, bytes of the stream, escapes, zero
MODE_ENTROPY = FORMS["bfloat16"].mode
LOW_BITS = 5  # mantissa bits that are kept as they are
MOST_UNIT = 4


@lru_cache(maxsize=1)
def coder() -> RansTables:
    return RansTables(spec.tables()[0].reshape(-1, spec.SYMBOLS), spec.PROB_BITS)


def low_planes(low: Bytes) -> bytes:
    """5-bit values: two halves of the run share bytes of 4 bits, eight eighths share bytes of 1 bit."""
    half = -(-len(low) // 2)
    nibbles = np.zeros((2, half), np.uint8)
    nibbles.ravel()[: len(low)] = low & 15
    packed: bytes = (nibbles[0] | nibbles[1] << 4).tobytes()
    return packed + bit_plane(low >> np.uint8(4))


def join_low(planes: Bytes, count: int) -> Bytes:
    """The inverse of `low_planes`."""
    half = -(-count // 2)
    nibbles = np.concatenate([planes[:half] & 15, planes[:half] >> 4])[:count]
    bits = np.unpackbits(planes[half:][None, :], axis=0, bitorder="little").reshape(-1)[:count]
    joined: Bytes = nibbles | bits << 4
    return joined


def planes_bytes(count: int) -> int:
    return -(-count // 2) + -(-count // 8)


def bit_plane(low: Bytes) -> bytes:
    """1-bit values: eight eighths of the run share bytes."""
    bits = np.zeros((8, -(-len(low) // 8)), np.uint8)
    bits.ravel()[: len(low)] = low
    return np.packbits(bits, axis=0, bitorder="little").tobytes()


def words_of(values: Head, dtype: str) -> Words:
    """What stands for values: sign, 8 bits of exponent and 7 of mantissa, as a bf16 has them."""
    form, wide = FORMS[dtype], values.astype(np.int64)
    sign = wide >> (form.exponent + form.mantissa)
    exponent = ((wide >> form.mantissa) & ((1 << form.exponent) - 1)) + form.bias
    mantissa = (wide & ((1 << form.mantissa) - 1)) << 7 >> form.mantissa
    return sign << 15 | exponent << 7 | mantissa


def values_of(words: Words, low: Words, dtype: str) -> Head:
    """The values. low: of fp32 their lower half, of the others the mantissa bits below the two highest."""
    form = FORMS[dtype]
    if form.exponent == 8:
        return (words << 8 * (form.item - 2) | low).astype(UNSIGNED[form.item])
    exponent = ((words >> 7) - form.bias) & ((1 << form.exponent) - 1)
    mantissa = (words >> LOW_BITS & 3) << (form.mantissa - 2) | low
    value = (words >> 15) << (form.exponent + form.mantissa) | exponent << form.mantissa | mantissa
    return value.astype(UNSIGNED[form.item])


def lower_bytes(heads: Sequence[Head], dtype: str) -> int:
    """How many bytes of the lower halves of fp32, from their top, are not 0 throughout."""
    if dtype != "float32":
        return 0
    found = int(np.bitwise_or.reduce(np.concatenate([head.ravel() for head in heads])))
    return 2 if found & 0xFF else 1 if found & 0xFF00 else 0


def kept_bytes(count: int, dtype: str, lower: int) -> int:
    """What is kept of `count` values of a head."""
    if dtype in ("bfloat16", "float32"):
        return planes_bytes(count) + lower * count
    return {"float16": count, "float8_e5m2": 0, "float8_e4m3fn": -(-count // 8)}[dtype]


def keep(values: Head, dtype: str, lower: int) -> bytes:
    """The bits of a head's values that symbols leave out."""
    if dtype in ("bfloat16", "float32"):
        planes = low_planes((words_of(values, dtype) & ((1 << LOW_BITS) - 1)).astype(np.uint8))
        half = values.astype(np.int64) & 0xFFFF
        return planes + {0: b"", 1: (half >> 8).astype("u1").tobytes(), 2: half.astype("<u2").tobytes()}[lower]
    if dtype == "float8_e4m3fn":
        return bit_plane((values & 1).astype(np.uint8))
    return (values & 0xFF).astype(np.uint8).tobytes() if dtype == "float16" else b""


def kept_of(memory: Bytes, count: int, dtype: str, lower: int) -> tuple[Words, Words]:
    """The inverse: the lowest bits of words, and `low` of `values_of`."""
    none = np.zeros(count, np.int64)
    if dtype in ("bfloat16", "float32"):
        below = join_low(memory[: planes_bytes(count)], count).astype(np.int64)
        rest = memory[planes_bytes(count) :].tobytes()
        if lower == 0:
            return below, none
        half = np.frombuffer(rest, f"<u{lower}", count).astype(np.int64)
        return below, half << (8 * (2 - lower))
    if dtype == "float8_e4m3fn":
        eighth = -(-count // 8)
        bits = np.unpackbits(memory[:eighth][None, :], axis=0, bitorder="little").reshape(-1)[:count]
        return none, bits.astype(np.int64)
    return none, memory[:count].astype(np.int64) if dtype == "float16" else none


def unit_of(anchor: npt.NDArray[np.int64]) -> int:
    """In what steps a head's mean exponents are told: 3 bits must do for all that are not far below the largest."""
    below = int(anchor.max()) - anchor
    most = int(below[below <= 7 * MOST_UNIT].max())
    return max(1, -(-most // 7))


def encode_layer(keys: Sequence[Head], values: Sequence[Head], dtype: str = "bfloat16") -> bytes:
    """One layer, in the mode of the dtype whatever it takes."""
    freqs, costs = spec.tables()
    form, lower = FORMS[dtype], lower_bytes([*keys, *values], dtype)
    tops, channels, low, escapes = b"", b"", b"", b""
    symbols: list[Bytes] = []
    classes: list[Bytes] = []
    for kind, heads in enumerate((keys, values)):
        for head in heads:
            tokens = len(head)
            wide = words_of(head, dtype)
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
            low += keep(head.ravel(), dtype, lower)
            escaped = head.ravel()[symbol.ravel() == spec.ESCAPE] >> 8 * (form.item - form.escape)
            escapes += escaped.astype(f"<u{form.escape}").tobytes()
            symbols.append(symbol.ravel().astype(np.uint8))
            classes.append(np.tile((chosen + spec.CLASSES * kind).astype(np.uint8), tokens))
    stream = coder().encode(np.concatenate(symbols), np.concatenate(classes))
    header = HEADER.pack(form.mode, lower, 0, len(stream), len(escapes) // form.escape, 0)
    return header + tops + channels + low + escapes + stream


def decode_layer(
    payload: bytes, shape: tuple[int, int, int, int], tokens: int, dtype: str = "bfloat16"
) -> tuple[list[Head], list[Head]]:
    """shape: heads of keys, dim of keys, heads of values, dim of values. Raises `CodecError`."""
    key_heads, key_dim, value_heads, value_dim = shape
    dims = [key_dim] * key_heads + [value_dim] * value_heads
    form = FORMS[dtype]
    if len(payload) < HEADER.size:
        raise CodecError("entropy: a layer is too short for its header")
    mode, lower, zero, stream_bytes, escapes, more = HEADER.unpack_from(payload)
    if mode != form.mode or zero or more or lower > (2 if dtype == "float32" else 0):
        raise CodecError("entropy: the header of a layer does not fit its dtype")
    sizes = [kept_bytes(tokens * dim, dtype, lower) for dim in dims]
    fixed = HEADER.size + 2 * len(dims) + sum(dims) + sum(sizes)
    if len(payload) != fixed + form.escape * escapes + stream_bytes:
        raise CodecError("entropy: the header of a layer does not fit its size")
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
    for dim, size in zip(dims, sizes, strict=True):
        lows.append(kept_of(memory[at : at + size], tokens * dim, dtype, lower))
        at += size
    listed = np.frombuffer(payload, f"<u{form.escape}", escapes, at).astype(np.int64)
    symbols = coder().decode(memory[at + form.escape * escapes :], tokens * sum(dims), np.concatenate(classes))
    if int((symbols == spec.ESCAPE).sum()) != escapes:
        raise CodecError("entropy: a layer has escapes that belong to no symbol")
    heads, first, used = [], 0, 0
    shift = 8 * (form.item - form.escape)
    for number, dim in enumerate(dims):
        symbol = symbols[first : first + tokens * dim].reshape(tokens, dim).astype(np.int64)
        first += tokens * dim
        sign = symbol >= spec.RELATIVE << spec.MANTISSA_BITS
        rest = symbol - sign * (spec.RELATIVE << spec.MANTISSA_BITS)
        top, unit = tops[number].tolist()
        exponent = top - deltas[number].astype(np.int64) * unit + spec.ABOVE - (rest >> spec.MANTISSA_BITS)
        words = (sign ^ flips[number].astype(bool)).astype(np.int64) << 15 | (exponent & 0xFF) << 7
        words |= (rest & 3) << LOW_BITS
        below, low = lows[number]
        head = values_of(words.ravel() | below, low, dtype)
        is_escape = symbol.ravel() == spec.ESCAPE
        upper = listed[used : used + int(is_escape.sum())]
        head[is_escape] = upper << shift | (head[is_escape].astype(np.int64) & ((1 << shift) - 1))
        used += int(is_escape.sum())
        heads.append(head.reshape(tokens, dim))
    return heads[:key_heads], heads[key_heads:]
