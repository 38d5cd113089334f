"""e4m3 under a prediction: the mixture of the published speculative coder in integers, and rANS with many lanes.

What a value is coded with is 0.95 of a normal distribution around its prediction, 0.03 of one three times as wide, and
0.02 of how often the code occurs at all. A code takes what of this lies between the numbers that are rounded to it. The
distribution is a table of integers over (edge - prediction) / scale in steps of 1/128, and each edge is one
subtraction, one multiplication and one rounding in float32: the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvstore.errors import CodecError

BITS = 16
CODES = 256
_TOTAL, _LOW = 1 << BITS, 1 << 16
_SEEN = 1311  # of 2**16: the 0.02 of the codes that occur, at least 1 each
_STEP, _REACH = 128.0, 2560  # 20 scales either way: the wide part ends at 6.7 of its own
_LANES = 1024  # each takes about 3 bytes more than it codes
_OCTAVES = 8.0  # steps of a scale in an octave
_ZERO = 160  # the scale 2**0

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Scales:
    """What encoder and decoder know besides the predictions. Immutable.

    Attributes:
        eighths: of each channel, eighth octaves of the standard deviation, uint8 `[channels]`; 160 is 1.
        seen: slots of each code of `CODES`, in the order of numbers, uint16 `[256]`; each at least 1, together 1311.
    """

    eighths: U8
    seen: npt.NDArray[np.uint16]

    @classmethod
    def of(cls, codes: U8, predicted: F32, values: F32) -> Scales:
        """Measure them. All `[rows, channels]`; values: what the codes stand for, NaN for none."""
        missed = np.where(np.isfinite(values), values - predicted, 0).astype(np.float64)
        deviation = np.sqrt(np.square(missed).mean(0)).clip(1e-9)
        eighths = (np.log2(deviation) * _OCTAVES).round() + _ZERO
        counts = np.bincount(ranks_of(codes).ravel(), minlength=CODES)
        seen = 1 + counts * (_SEEN - CODES) // max(1, counts.sum())
        seen[counts.argmax()] += _SEEN - seen.sum()
        return cls(eighths.clip(0, 255).astype(np.uint8), seen.astype(np.uint16))

    def pack(self) -> bytes:
        return self.eighths.tobytes() + self.seen.astype("<u2").tobytes()

    @classmethod
    def parse(cls, data: bytes, channels: int) -> Scales:
        """Raises `CodecError` unless `pack` wrote this."""
        if len(data) != channels + 2 * CODES:
            raise CodecError("speculative: the scales end too early")
        seen = np.frombuffer(data[channels:], "<u2")
        if seen.min() < 1 or seen.sum() != _SEEN:
            raise CodecError("speculative: the frequencies of codes are out of range")
        return cls(np.frombuffer(data[:channels], np.uint8), seen)

    @cached_property
    def inverse(self) -> F32:
        """Steps of the table that a number takes, by channel: 128 / scale."""
        powers = np.array([_STEP * 2.0 ** ((_ZERO - e) / _OCTAVES) for e in range(256)]).astype(np.float32)
        # Rounded to 12 bits: no library's power is off by so much.
        return (powers.view(np.uint32) + 0x800 & 0xFFFFF000).astype(np.uint32).view(np.float32)[self.eighths]

    @cached_property
    def starts(self) -> I64:
        """Of the codes' own share, the slots before each, [257]."""
        return np.concatenate([[0], self.seen.astype(np.int64).cumsum()])


def encode(codes: U8, predicted: F32, scales: Scales) -> bytes:
    """Return the stream of codes of e4m3. codes, predicted: `[rows, channels]`, every prediction finite."""
    ranks = ranks_of(codes).ravel()
    mean, inverse = predicted.ravel(), np.broadcast_to(scales.inverse, predicted.shape).ravel()
    begin = _slots(ranks, mean, inverse, scales)
    count = _slots(ranks + 1, mean, inverse, scales) - begin
    states = np.full(_LANES, _LOW, np.int64)
    words = list[npt.NDArray[np.uint16]]()
    for at in reversed(range(0, len(ranks), _LANES)):
        start, freq = begin[at : at + _LANES], count[at : at + _LANES]
        x = states[: len(start)]
        full = x >= freq << (32 - BITS)
        words.append((x[full] & 0xFFFF).astype("<u2"))
        x = np.where(full, x >> 16, x)
        states[: len(start)] = (x // freq << BITS) + x % freq + start
    return states.astype("<u4").tobytes() + np.concatenate([*words[::-1], np.zeros(0, "<u2")]).tobytes()


def decode(data: bytes, predicted: F32, scales: Scales) -> U8:
    """Return the codes of a stream, uint8 of the shape of `predicted`. Raises `CodecError` if it is no such stream."""
    if len(data) < 4 * _LANES or len(data) % 2:
        raise CodecError("speculative: the length of a stream is impossible")
    states = np.frombuffer(data[: 4 * _LANES], "<u4").astype(np.int64)
    words, taken = np.frombuffer(data[4 * _LANES :], "<u2"), 0
    if states.min() < _LOW:
        raise CodecError("speculative: a state is out of range")
    mean, inverse = predicted.ravel(), np.broadcast_to(scales.inverse, predicted.shape).ravel()
    ranks = np.empty(len(mean), np.int64)
    for at in range(0, len(mean), _LANES):
        here = slice(at, at + _LANES)
        x = states[: len(mean[here])]
        slot = x & (_TOTAL - 1)
        rank = np.zeros(len(x), np.int64)
        for step in (128, 64, 32, 16, 8, 4, 2, 1):
            rank += step * (_slots(rank + step, mean[here], inverse[here], scales) <= slot)
        start = _slots(rank, mean[here], inverse[here], scales)
        freq = _slots(rank + 1, mean[here], inverse[here], scales) - start
        x = freq * (x >> BITS) + slot - start
        low = np.flatnonzero(x < _LOW)
        if taken + len(low) > len(words):
            raise CodecError("speculative: a stream ends too early")
        x[low] = x[low] << 16 | words[taken : taken + len(low)]
        taken += len(low)
        states[: len(x)] = x
        ranks[here] = rank
    if taken != len(words) or (states != _LOW).any():
        raise CodecError("speculative: a stream does not end with its last value")
    return codes_of(ranks).reshape(predicted.shape)


def ranks_of(codes: U8) -> I64:
    """Codes in the order of the numbers that they stand for, 0 to 255: -NaN, -448, ..., -0, 0, ..., 448, NaN."""
    whole = codes.astype(np.int64)
    return np.where(whole < 128, 128 + whole, 255 - whole)


def codes_of(ranks: I64) -> U8:
    return np.where(ranks < 128, 255 - ranks, ranks - 128).astype(np.uint8)


def _slots(ranks: I64, mean: F32, inverse: F32, scales: Scales) -> I64:
    """The slots before the codes of these ranks, 0 to 256."""
    with np.errstate(over="ignore"):  # infinite is far enough
        steps = np.rint((edges_of_codes()[ranks] - mean) * inverse)
    at = steps.clip(-_REACH, _REACH).astype(np.int64) + _REACH
    # The ends are exact whatever the prediction is: all slots belong to codes.
    inner = np.where(ranks <= 0, 0, np.where(ranks >= CODES, _TOTAL - _SEEN, _below()[at]))
    return inner + scales.starts[ranks]


@lru_cache(maxsize=1)
def edges_of_codes() -> F32:
    """The least number that is rounded to the code of each rank, [257]; those of rank 0 and 256 are beyond all."""
    sizes = [m * 2.0**-9 for m in range(8)]
    sizes += [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)]
    sizes[127] = 480.0  # where NaN is: what would follow 448
    between = [(a + b) / 2 for a, b in pairwise(sizes)]
    return np.array([-1e30, *(-x for x in reversed(between)), 0.0, *between, 1e30], np.float32)


@lru_cache(maxsize=1)
def _below() -> I64:
    """Slots of the two normal parts below each step of the table, [2 * _REACH + 1]."""

    def normal(z: float) -> float:
        return 0.5 * math.erfc(-z * math.sqrt(0.5))

    every = _TOTAL - _SEEN
    found = []
    for step in range(-_REACH, _REACH + 1):
        z = step / _STEP
        found.append(int(every * (0.95 * normal(z) + 0.03 * normal(z / 3)) / 0.98 * 256) + 128 >> 8)
    return np.array(found, np.int64)
