"""The entropy coder in plain Python: what csrc/rans/rans.h means. Slow; tests compare with it byte for byte."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvstore.errors import CodecError

LANES, LOW = 32, 1 << 15
Freqs = Sequence[Sequence[int]]


def encode(freqs: Freqs, bits: int, symbols: bytes, classes: bytes) -> bytes:
    """Symbol i is coded with freqs[classes[i % len(classes)]]; each row sums to 2**bits, each frequency is not 0."""
    return encode_parts(freqs, bits, [(symbols, classes)])[0]


def encode_parts(freqs: Freqs, bits: int, parts: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, list[int]]:
    """One stream of parts (symbols, classes), each as in `encode`; and the bytes up to the end of each part's words."""
    states, words, counts = [LOW] * LANES, list[int](), list[int]()
    for symbols, classes in reversed(parts):
        counts.append(len(words))
        for i in reversed(range(len(symbols))):
            row, s, x = freqs[classes[i % len(classes)]], symbols[i], states[i % LANES]
            if x >= row[s] << (31 - bits):
                words.append(x & 0xFFFF)
                x >>= 16
            states[i % LANES] = (x // row[s] << bits) + x % row[s] + sum(row[:s])
    if not any(symbols for symbols, _ in parts):
        return b"", [0] * len(parts)
    stream = struct.pack(f"<{LANES}I{len(words)}H", *states, *reversed(words))
    return stream, [len(stream) - 2 * after for after in reversed(counts)]


def decode(freqs: Freqs, bits: int, stream: bytes, count: int, classes: bytes) -> bytes:
    """The inverse; CodecError unless `encode` can have written the stream."""
    return decode_parts(freqs, bits, stream, [(count, classes)])[0]


def decode_parts(freqs: Freqs, bits: int, stream: bytes, parts: Sequence[tuple[int, bytes]]) -> list[bytes]:
    """The symbols of each part (count, classes); CodecError unless `encode_parts` can have written the stream."""
    if not any(count for count, _ in parts):
        if stream:
            raise CodecError("rans: the length of the stream is impossible")
        return [b"" for _ in parts]
    if len(stream) < 4 * LANES or len(stream) % 2:
        raise CodecError("rans: the length of the stream is impossible")
    numbers = struct.unpack(f"<{LANES}I{len(stream) // 2 - 2 * LANES}H", stream)
    states, words, found, taken = list(numbers[:LANES]), numbers[LANES:], list[bytes](), 0
    if not all(LOW <= x < 1 << 31 for x in states):
        raise CodecError("rans: the first states are out of range")
    for count, classes in parts:
        symbols = bytearray()
        for i in range(count):
            row, x, s = freqs[classes[i % len(classes)]], states[i % LANES], 0
            rest = x % (1 << bits)
            while rest >= row[s]:
                rest, s = rest - row[s], s + 1
            symbols.append(s)
            x = row[s] * (x >> bits) + rest
            if x < LOW:
                if taken == len(words):
                    raise CodecError("rans: the stream has too few words")
                x, taken = x << 16 | words[taken], taken + 1
            states[i % LANES] = x
        found.append(bytes(symbols))
    if taken != len(words) or states != [LOW] * LANES:
        raise CodecError("rans: the stream does not end in its last states")
    return found
