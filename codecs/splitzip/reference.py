"""The splitzip format in plain numpy: what the fast twins are compared with, byte for byte (FORMAT.md, "splitzip").

Slow on purpose. A *unit* is the contiguous run of one head: `[tokens * dim]` values as unsigned integers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import CodecError

Values = npt.NDArray[np.unsignedinteger[Any]]

HEADER = struct.Struct("<IIII")  # mode, chunks, bytes of escapes, chunks stored raw
MODE_FIXED = 1
CHUNK = 4096  # values of one head that share a window
GROUP = 32  # every head's planes start at a multiple of so many values
CODES = 16
ZERO_FLAG = 1 << 31
# Of a chunk's values: more than this share below the window of the largest exponent, and the window is chosen so that
# at most that share is above it.
LOW_SHIFT, HIGH_SHIFT = 6, 5

# By dtype: bytes of a value, of its low plane, and whether the rest of its head (sign and mantissa) is 8 or 3 bits.
DTYPES = {"bfloat16": (2, 0, 8), "float32": (4, 2, 8), "float8_e5m2": (1, 0, 3), "float16": (2, 1, 3)}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def split(values: Values, dtype: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], Values]:
    """Exponents, rest of the head (sign, then mantissa bits), and what is below the head, of every value."""
    _, low_bytes, rest_bits = DTYPES[dtype]
    head = values.astype(np.uint64) >> (8 * low_bytes)
    mantissa = rest_bits - 1
    exponent = (head >> mantissa) & (0xFF if rest_bits == 8 else 0x1F)
    sign = head >> (15 if rest_bits == 8 else 7)
    rest = (sign << mantissa) | (head & ((1 << mantissa) - 1))
    low = values.astype(np.uint64) & ((1 << (8 * low_bytes)) - 1)
    return exponent.astype(np.uint8), rest.astype(np.uint8), low.astype(UNSIGNED[max(1, low_bytes)])


def join(exponent: npt.NDArray[np.uint8], rest: npt.NDArray[np.uint8], low: Values, dtype: str) -> Values:
    """The inverse of `split`."""
    item, low_bytes, rest_bits = DTYPES[dtype]
    mantissa = rest_bits - 1
    wide = rest.astype(np.uint64)
    head = (wide >> mantissa) << (15 if rest_bits == 8 else 7)
    head |= ((exponent.astype(np.uint64) & (0xFF if rest_bits == 8 else 0x1F)) << mantissa) | (
        wide & ((1 << mantissa) - 1)
    )
    joined: Values = ((head << (8 * low_bytes)) | low).astype(UNSIGNED[item])
    return joined


def window(exponents: npt.NDArray[np.uint8]) -> tuple[int, bool]:
    """Base of a chunk's window of 16 exponents, and whether code 0 stands for exponent 0 instead of the base."""
    count, top = len(exponents), int(exponents.max())
    base, zero = _below(exponents, top)
    low = (exponents < base) if not zero else (exponents <= base) & (exponents != 0)
    if int(low.sum()) > count >> LOW_SHIFT:
        top = next(m for m in range(256) if int((exponents > m).sum()) <= count >> HIGH_SHIFT)
        base, zero = _below(exponents, top)
    return base, zero


def _below(exponents: npt.NDArray[np.uint8], top: int) -> tuple[int, bool]:
    base = max(top, CODES - 1) - (CODES - 1)
    return base, base > 0 and bool((exponents == 0).any())


def raw_bytes(count: int, dtype: str) -> int:
    """What the high bits of `count` exponents take in a chunk that is stored raw: 4 or 1 bits each."""
    return -(-count // 2) if DTYPES[dtype][2] == 8 else -(-count // 8)


def encode_chunk(exponents: npt.NDArray[np.uint8], dtype: str) -> tuple[npt.NDArray[np.uint8], int, bool, bytes, bool]:
    """4-bit codes, base, zero flag, escape bytes, and whether the chunk is stored raw."""
    base, zero = window(exponents)
    code = exponents.astype(np.int64) - base
    fits = (code >= int(zero)) & (code < CODES)
    is_zero = (exponents == 0) & zero
    codes = np.where(fits, code, 0).astype(np.uint8)
    escaped = np.flatnonzero(~(fits | is_zero))
    if 3 * len(escaped) >= raw_bytes(len(exponents), dtype):
        high = exponents >> np.uint8(4)
        packed = nibbles(high) if DTYPES[dtype][2] == 8 else np.packbits(high, bitorder="little").tobytes()
        return exponents & np.uint8(15), 0, False, packed, True
    escapes = b"".join(struct.pack("<HB", i, exponents[i]) for i in escaped.tolist())
    return codes, base, zero, escapes, False


def nibbles(values: npt.NDArray[np.uint8]) -> bytes:
    """Two values a byte, the first in the low half."""
    even = np.append(values, np.zeros(len(values) % 2, np.uint8))
    return (even[::2] | (even[1::2] << 4)).tobytes()


def bit_planes(rest: npt.NDArray[np.uint8]) -> bytes:
    """3-bit values as three little-endian words of 32 bits per 32 values, lowest bits first."""
    bits = (rest[:, None] >> np.arange(3)) & 1
    words = bits.reshape(-1, GROUP, 3).transpose(0, 2, 1)
    return np.packbits(words, axis=-1, bitorder="little").tobytes()


def encode_layer(units: Sequence[Values], dtype: str) -> bytes:
    """One layer: its heads' keys, then its heads' values."""
    _, low_bytes, rest_bits = DTYPES[dtype]
    code_plane, rest_plane, low_plane, escapes = b"", b"", b"", b""
    ends, bases, raw = [], [], 0
    for values in units:
        exponents, rest, low = split(values, dtype)
        pad = -len(values) % GROUP
        codes = np.zeros(len(values) + pad, np.uint8)
        for begin in range(0, len(values), CHUNK):
            part = slice(begin, min(begin + CHUNK, len(values)))
            codes[part], base, zero, escaped, is_raw = encode_chunk(exponents[part], dtype)
            escapes += escaped
            ends.append(len(escapes) | (ZERO_FLAG if zero else 0))
            bases.append(base)
            raw += is_raw
        rest = np.append(rest, np.zeros(pad, np.uint8))
        code_plane += nibbles(codes)
        rest_plane += rest.tobytes() if rest_bits == 8 else bit_planes(rest)
        if low_bytes:
            low_plane += np.append(low, np.zeros(pad, low.dtype)).tobytes()
    layer = HEADER.pack(MODE_FIXED, len(ends), len(escapes), raw) + code_plane + rest_plane + low_plane
    layer += struct.pack(f"<{len(ends)}I", *ends) + bytes(bases) + escapes
    return layer + bytes(-len(layer) % 16)


def decode_layer(payload: bytes, runs: Sequence[int], dtype: str) -> list[Values]:
    """The units, whose lengths are `runs`. Raises `CodecError` for anything that `encode_layer` cannot have made."""
    _, low_bytes, rest_bits = DTYPES[dtype]
    padded = [-(-run // GROUP) * GROUP for run in runs]
    total = sum(padded)
    count = sum(-(-run // CHUNK) for run in runs)
    planes = HEADER.size + total // 2 + total * rest_bits // 8 + total * low_bytes
    if len(payload) < planes + 5 * count:
        raise CodecError(f"splitzip: {len(payload)} bytes cannot hold {total} values")
    mode, chunks, escape_bytes, _ = HEADER.unpack_from(payload)
    begin = planes + 5 * count
    if mode != MODE_FIXED or chunks != count or len(payload) != -(-(begin + escape_bytes) // 16) * 16:
        raise CodecError("splitzip: the header does not fit the layer")
    memory = np.frombuffer(payload, np.uint8)
    packed = memory[HEADER.size : HEADER.size + total // 2]
    codes = np.stack([packed & 15, packed >> 4], axis=1).ravel()
    rest = memory[HEADER.size + total // 2 : planes - total * low_bytes]
    if rest_bits == 3:
        words = np.unpackbits(rest.reshape(-1, 3, 4), axis=-1, bitorder="little").reshape(-1, 3, GROUP)
        rest = (words * np.array([1, 2, 4], np.uint8)[:, None]).sum(axis=1, dtype=np.uint8).ravel()
    low: Values = np.zeros(total, np.uint8)
    if low_bytes:
        low = memory[planes - total * low_bytes : planes].view(UNSIGNED[low_bytes])
    ends = np.frombuffer(payload, "<u4", count, planes).astype(np.int64)
    bases = memory[planes + 4 * count : begin]
    units, at, chunk, before = [], 0, 0, 0
    for run, room in zip(runs, padded, strict=True):
        exponents = np.zeros(run, np.uint8)
        for first in range(0, run, CHUNK):
            length = min(CHUNK, run - first)
            end, zero = int(ends[chunk]) & (ZERO_FLAG - 1), bool(ends[chunk] & ZERO_FLAG)
            size = end - before
            code = codes[at + first : at + first + length]
            part = exponents[first : first + length]
            most = raw_bytes(length, dtype)
            if size < 0 or end > escape_bytes or (size != most and (size % 3 or size > most)):
                raise CodecError("splitzip: escapes of an impossible size")
            escapes = payload[begin + before : begin + end]
            if size == most:
                high = np.frombuffer(escapes, np.uint8)
                if rest_bits == 8:
                    high = np.stack([high & 15, high >> 4], axis=1).ravel()
                else:
                    high = np.unpackbits(high, bitorder="little")
                part[:] = code | (high[:length] << 4)
            else:
                part[:] = np.where((code == 0) & zero, 0, code + bases[chunk])
                for position, exponent in struct.iter_unpack("<HB", escapes):
                    if position >= length:
                        raise CodecError("splitzip: an escape outside of its chunk")
                    part[position] = exponent
            before, chunk = end, chunk + 1
        units.append(join(exponents, rest[at : at + run], low[at : at + run], dtype))
        at += room
    if before != escape_bytes:
        raise CodecError("splitzip: escapes that belong to no chunk")
    return units
