"""The entropy coder in plain Python: what csrc/rans.h means. Slow; tests compare with it byte for byte."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvstore.errors import CodecError

LANES, LOW = 32, 1 << 15


def encode(freqs: Sequence[Sequence[int]], bits: int, symbols: bytes, classes: bytes) -> bytes:
    """Symbol i is coded with freqs[classes[i % len(classes)]]; each row sums to 2**bits, each frequency is not 0."""
    states, words = [LOW] * LANES, []
    for i in reversed(range(len(symbols))):
        row, s, x = freqs[classes[i % len(classes)]], symbols[i], states[i % LANES]
        if x >= row[s] << (31 - bits):
            words.append(x & 0xFFFF)
            x >>= 16
        states[i % LANES] = (x // row[s] << bits) + x % row[s] + sum(row[:s])
    return struct.pack(f"<{LANES}I{len(words)}H", *states, *reversed(words)) if symbols else b""


def decode(freqs: Sequence[Sequence[int]], bits: int, stream: bytes, count: int, classes: bytes) -> bytes:
    """The inverse; CodecError unless `encode` can have written the stream."""
    if count == 0 and not stream:
        return b""
    if count == 0 or len(stream) < 4 * LANES or len(stream) % 2:
        raise CodecError("rans: length")
    numbers = struct.unpack(f"<{LANES}I{len(stream) // 2 - 2 * LANES}H", stream)
    states, words, symbols, taken = list(numbers[:LANES]), numbers[LANES:], bytearray(), 0
    if not all(LOW <= x < 1 << 31 for x in states):
        raise CodecError("rans: first states")
    for i in range(count):
        row, x, s = freqs[classes[i % len(classes)]], states[i % LANES], 0
        rest = x % (1 << bits)
        while rest >= row[s]:
            rest, s = rest - row[s], s + 1
        symbols.append(s)
        x = row[s] * (x >> bits) + rest
        if x < LOW:
            if taken == len(words):
                raise CodecError("rans: too few words")
            x, taken = x << 16 | words[taken], taken + 1
        states[i % LANES] = x
    if taken != len(words) or states != [LOW] * LANES:
        raise CodecError("rans: last states")
    return bytes(symbols)
