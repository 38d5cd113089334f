"""HIGGS (arXiv 2411.17525): rows of numbers by a random rotation, one scale, and a grid for pairs. Deterministic.

A row is rotated by a Hadamard matrix with random signs, in groups of the largest power of two that divides it, so that
nothing is padded; what comes out is nearly normal whatever went in. It is divided by the row's root mean square, and
each pair of numbers is coded as the nearest point of a fixed grid (grids.py).

Coded rows: the scales, bf16, `[rows]`; then the numbers of the points, row after row, 2 * bits each, first bits lowest,
without gaps. A row of an odd number of values ends with a zero.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvstore.codecs.aqua.grids import BITS, grid, nearest
from kvstore.errors import CodecError

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

GROUP = 1024  # the most values that are rotated together
SEED = 0x48494747_53000001  # of the signs; part of the format
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Higgs:
    """Codes `[rows, width]` float32 with 2, 3 or 4 bits a value and 16 a row."""

    number = 0
    bits = BITS

    def size(self, rows: int, width: int, bits: int) -> int:
        """Bytes of so many coded rows."""
        return 2 * rows + packed_size(rows * ((width + 1) // 2), 2 * bits)

    def encode(self, values: Floats, bits: int) -> Bytes | None:
        """The coded rows; None where a value, or a scale as bf16, is not finite."""
        rows, width = values.shape
        with np.errstate(over="ignore", invalid="ignore"):
            rms = np.sqrt(np.square(values, dtype=np.float64).mean(axis=1)).astype(np.float32)
        codes = _to_bf16(rms)
        scale = _from_bf16(codes)
        if not np.isfinite(scale).all():
            return None
        divisor: Floats = np.where(scale > 0, scale, np.float32(np.inf)).astype(np.float32)
        rotated = rotate(values / divisor[:, None])
        pairs = np.zeros((rows, (width + 1) // 2 * 2), np.float32)
        pairs[:, :width] = rotated
        indices = nearest(pairs[:, 0::2].reshape(-1), pairs[:, 1::2].reshape(-1), bits)
        return np.concatenate([codes.astype("<u2").view(np.uint8), pack(indices, 2 * bits)])

    def decode(self, data: Bytes, rows: int, width: int, bits: int) -> Floats:
        """The inverse. data: `size(rows, width, bits)` bytes. Raises `CodecError` for a scale that cannot be."""
        codes = data[: 2 * rows].view("<u2").astype(np.uint16)
        if (codes >= 0x7F80).any():  # negative, infinite, or not a number
            raise CodecError("aqua: the scale of a row is negative or not finite")
        half = (width + 1) // 2
        points = grid(bits)[unpack(data[2 * rows :], rows * half, 2 * bits)]
        return rotate_back(points.reshape(rows, 2 * half)[:, :width]) * _from_bf16(codes)[:, None]


def rotate(values: Floats) -> Floats:
    """The rows `[rows, width]` rotated; lengths stay."""
    return _hadamard(values * signs(values.shape[1]))


def rotate_back(values: Floats) -> Floats:
    """The inverse of `rotate`."""
    return _hadamard(values) * signs(values.shape[1])


def group_of(width: int) -> int:
    """How many values of a row are rotated together: the largest power of two that divides it, at most 1,024."""
    return min(width & -width, GROUP)


@lru_cache(maxsize=64)
def signs(width: int) -> Floats:
    """`[width]` of 1 and -1: the highest bits of SplitMix64 seeded with `SEED`. Do not write into it."""
    with np.errstate(over="ignore"):
        state = np.uint64(SEED) + np.arange(1, width + 1, dtype=np.uint64) * np.uint64(_MIX[0])
        state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX[1])
        state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX[2])
        state ^= state >> np.uint64(31)
    return np.where(state >> np.uint64(63), np.float32(-1), np.float32(1))


def _hadamard(values: Floats) -> Floats:
    """Butterflies in a fixed order, in float32: a matrix product's sums would differ between machines."""
    rows, width = values.shape
    group = group_of(width)
    x = np.ascontiguousarray(values.reshape(-1, group).T)
    half = 1
    while half < group:
        pairs = x.reshape(group // (2 * half), 2, -1)
        total = pairs[:, 0] + pairs[:, 1]
        np.subtract(pairs[:, 0], pairs[:, 1], out=pairs[:, 1])
        pairs[:, 0] = total
        half *= 2
    x *= np.float32(group**-0.5)
    return np.ascontiguousarray(x.T).reshape(rows, width)


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` numbers of `bits` bits."""
    return (count * bits + 7) // 8


def pack(numbers: Bytes, bits: int) -> Bytes:
    """`[n]` numbers below 2**bits, without gaps, first bits lowest."""
    padded = np.zeros((-(-len(numbers) // 8), 8), np.uint64)
    padded.reshape(-1)[: len(numbers)] = numbers
    words = np.zeros(len(padded), np.uint64)  # eight numbers each, in the lowest bits
    for place in range(8):
        words |= padded[:, place] << np.uint64(bits * place)
    octets = words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :bits]
    return octets.reshape(-1)[: packed_size(len(numbers), bits)]


def unpack(data: Bytes, count: int, bits: int) -> Bytes:
    """The inverse of `pack`: the first `count` numbers."""
    octets = np.zeros((-(-count // 8), 8), np.uint8)
    padded = np.zeros((len(octets), bits), np.uint8)
    padded.reshape(-1)[: len(data)] = data
    octets[:, :bits] = padded
    words = octets.reshape(-1).view("<u8").astype(np.uint64)
    numbers = np.empty((len(words), 8), np.uint8)
    for place in range(8):
        numbers[:, place] = (words >> np.uint64(bits * place)) & np.uint64((1 << bits) - 1)
    return numbers.reshape(-1)[:count]


def _to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """The nearest bf16 of each, ties to even; not a number stays so."""
    codes = values.view(np.uint32)
    rounded = (codes + 0x7FFF + ((codes >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _from_bf16(codes: npt.NDArray[np.uint16]) -> Floats:
    return (codes.astype(np.uint32) << 16).view(np.float32)
