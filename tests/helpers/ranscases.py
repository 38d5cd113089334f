"""Tables, classes and symbols for tests of the entropy coder."""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt

from kvstore.codecs.levels import cpu_levels
from kvstore.codecs.rans.coder import RansTables, quantise

U8 = npt.NDArray[np.uint8]
HAVE = cpu_levels()
Freqs = npt.NDArray[np.uint16]


def random_freqs(rng: np.random.Generator, tables: int, bits: int) -> Freqs:
    """Tables of all kinds: one symbol only, two of which one is rare, few, skewed, all."""
    counts = np.zeros((tables, 256), np.int64)
    for row, kind in zip(counts, rng.permutation(tables) % 5, strict=True):
        if kind == 0:
            row[rng.integers(256)] = 1
        elif kind == 1:
            row[rng.choice(256, 2, replace=False)] = 1, 1 << bits
        elif kind == 2:
            row[rng.choice(256, 7, replace=False)] = rng.integers(1, 99, 7)
        elif kind == 3:
            row[:] = 1
            row[rng.integers(256)] = 1 << 20
        else:
            row[:] = rng.integers(0, 1 << 16, 256)
    return quantise(counts, bits)


def random_symbols(rng: np.random.Generator, freqs: Freqs, classes: U8, n: int) -> U8:
    """Symbols as their tables have them, and the rare ones more often than that."""
    symbols = np.empty(n, np.uint8)
    which = np.resize(classes, n)
    for number, row in enumerate(freqs):
        places = np.flatnonzero(which == number)
        likely = rng.choice(256, len(places), p=row / row.sum())
        even = rng.choice(np.flatnonzero(row), len(places))
        symbols[places] = np.where(rng.random(len(places)) < 0.8, likely, even)
    return symbols


def case(seed: int, n: int, period: int, tables: int, bits: int) -> tuple[Freqs, U8, U8]:
    rng = np.random.default_rng(seed)
    freqs = random_freqs(rng, tables, bits)
    classes = rng.integers(0, tables, period, dtype=np.uint8)
    return freqs, random_symbols(rng, freqs, classes, n), classes


def golden_stream(seed: int, n: int, period: int, tables: int, bits: int) -> bytes:
    """A stream, and the same symbols as a stream of two parts, with all that it takes to decode them: JSON."""
    freqs, symbols, classes = case(seed, n, period, tables, bits)
    coder, half = RansTables(freqs, bits), n // 2
    parts, ends = coder.encode_parts([symbols[:half], symbols[half:]], [classes, np.roll(classes, -half)])
    found = {
        "bits": bits,
        "freqs": [row.tolist() for row in freqs],
        "classes": classes.tolist(),
        "symbols": symbols.tobytes().hex(),
        "stream": coder.encode(symbols, classes).hex(),
        "parts": parts.hex(),
        "ends": ends,
    }
    return json.dumps(found, separators=(",", ":")).encode() + b"\n"
