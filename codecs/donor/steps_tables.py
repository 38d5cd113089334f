"""The tables of the donor codec's step mode: frequencies of classes and of numbers, and what follows from them.

Part of the format. They come from formulas in integers, so that no file is needed; the constants were fitted to what
SmolLM2's caches differ in from those behind other prefixes, at steps that take 0.003 to 1.7 bits a value.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvstore.codecs.rans.coder import quantise

CLASSES = 16  # of a group of channels: 0 is nothing coded, c > 0 a mean of |number| of 2**(-8 + (c - 1) / 1.5)
SCALES = 18  # tables of numbers, by the same means, on to 2**(-8 + 17 / 1.5)
LARGEST = 15  # numbers are -15..15
ESCAPE = 2 * LARGEST + 1  # the symbol of a value that is kept as it was; number n is symbol n + LARGEST
SYMBOLS = ESCAPE + 1
LEAST_SHIFT, MOST_SHIFT = -6, 8  # classes that a row can be off
COST_UNIT = 256  # of a bit
ESCAPE_BITS = 16

QUARTERS = (38968, 46341, 55109)  # 2**15 * 2**(i / 4)
STEPS = (4096, 4871, 5793, 6889)  # 4096 * 2**(i / 4): so few bits that a number of steps is exact in float32
EXPECTED = np.array([16, 25, 40, 64, 102, 161, 256, 406, 645, 1024, 1625, 2580, 4096, 6502, 10321], np.int64)
"""4096 times the mean of classes 1 to 15."""
BOUNDS = np.array(
    [5161, 8192, 13004, 20643, 32768, 52016, 82570, 131072, 208064, 330281, 524288, 832255, 1321123, 2097152], np.int64
)
"""65536 * 2**((shift - 1/2) / 1.5) of the shifts but the least: a row has a shift from this ratio on."""

# Of 4096: how many numbers are not 0, and how many of n or more are more than n.
_CODED = (16, 25, 40, 64, 101, 160, 253, 399, 624, 956, 1403, 1920, 2437, 2893, 3303, 3604, 3641, 3716)
_RATIO = (20, 25, 25, 27, 33, 41, 49, 74, 131, 270, 561, 1049, 1659, 2273, 2785, 3195, 3523, 3727)
# Of 4096: how many groups are of class 0 where the mean class two parts before was 0, 1 and so on.
_NOTHING = (3800, 2180, 1270, 700, 350, 165, 80, 40, 20, 10, 5, 3, 2, 1, 1, 1)

Freqs = npt.NDArray[np.uint16]


def _numbers(coded: int, ratio: int) -> list[int]:
    """Frequencies of symbols. A number that would have less than 1 is escaped, and all beyond it."""
    row, left = [0] * SYMBOLS, coded << 12
    for n in range(1, LARGEST + 1):
        each = left * (4096 - ratio) >> 25
        if not each:
            break
        row[LARGEST + n] = row[LARGEST - n] = each
        left = left * ratio >> 12
    row[ESCAPE] = max(1, left >> 12)
    row[LARGEST] = 4096 - sum(row)
    return row


def _classes(mean: int) -> list[int]:
    """Weights of the classes after a part of this mean class."""
    some = [(5 ** abs(c - mean) << 20) // 8 ** abs(c - mean) for c in range(1, CLASSES)]
    return [sum(some) * _NOTHING[mean] // (4096 - _NOTHING[mean]), *some]


@lru_cache(maxsize=1)
def frequencies() -> Freqs:
    """uint16 [CLASSES + SCALES, SYMBOLS], each row's sum 4096: of classes by the mean class before, of numbers."""
    rows = np.zeros((CLASSES + SCALES, SYMBOLS), np.uint16)
    rows[:CLASSES, :CLASSES] = quantise(np.array([_classes(mean) for mean in range(CLASSES)]), 12, floor=True)
    rows[CLASSES:] = [_numbers(*pair) for pair in zip(_CODED, _RATIO, strict=True)]
    return rows


@lru_cache(maxsize=1)
def limits() -> npt.NDArray[np.uint8]:
    """Of every table of numbers the largest that is no escape, uint8 [SCALES]."""
    found: npt.NDArray[np.uint8] = ((frequencies()[CLASSES:, LARGEST:ESCAPE] > 0).sum(1) - 1).astype(np.uint8)
    return found


@lru_cache(maxsize=1)
def costs() -> npt.NDArray[np.int32]:
    """What a number takes by its magnitude, in 1 / COST_UNIT bit, int32 [SCALES, LARGEST + 2]; the last: escapes."""
    found = np.empty((SCALES, LARGEST + 2), np.int32)
    for row, freqs in zip(found, frequencies()[CLASSES:].tolist(), strict=True):
        escape = COST_UNIT * ESCAPE_BITS + _cost(freqs[ESCAPE])
        row[:] = [_cost(f) if f else escape for f in freqs[LARGEST:ESCAPE]] + [escape]
    return found


def _cost(freq: int) -> int:
    """COST_UNIT * (12 - log2(freq)), rounded up, without floating point."""
    power: int = freq**COST_UNIT
    return 12 * COST_UNIT - (power.bit_length() - 1)
