# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""rANS, coding: one program of one warp a stream, the last symbol first, so that streams grow down from the end of
their room. The format is in csrc/rans/rans.h."""

import triton
import triton.language as tl

from kvstore.codecs.rans.kernels.lanes import COUNT, FIRST, HEADER_WORDS, LANES, LOW, below, bits_of, ones, within

# What a stream's status says besides 0.
BAD_SYMBOL = tl.constexpr(1)  # a class has no table, or a symbol the frequency 0 in its table
NO_ROOM = tl.constexpr(2)


@triton.jit
def _load_symbols(symbols, classes, start, count, lane):
    """Of the step from symbol `start` on: (symbols, classes)."""
    inside = (start + lane >= 0) & (start + lane < count)
    symbol = tl.load(symbols + start + lane, mask=inside, other=0).to(tl.int32)
    klass = tl.load(classes + start + lane, mask=inside, other=0).to(tl.int32)
    return symbol, klass


@triton.jit
def _load_entries(symbol, klass, start, count, entries, tables, lane):
    """The same step: (entry, reciprocal, whether a class has no table)."""
    inside = (start + lane >= 0) & (start + lane < count)
    entry = entries + 2 * (tl.minimum(klass, tables - 1) * 256 + symbol)
    first = tl.load(entry, mask=inside, other=0).to(tl.uint32, bitcast=True)
    second = tl.load(entry + 1, mask=inside, other=0).to(tl.uint32, bitcast=True)
    return first, second, klass >= tables


@triton.jit
def encode_part(x, top, words, symbols, classes, count, entries, tables, lane, BITS: tl.constexpr):
    """Codes `count` symbols backwards: (states, top, whether all could be coded).

    x: uint32 `[LANES]` states; words: of a room, free from the header's on up to `top`. No other is written; `top` goes
    to one below the header's end, no further, where they do not suffice.
    """
    bad = tl.zeros((LANES,), tl.int32)
    start = (tl.cdiv(count, LANES) - 1) * LANES
    symbol, klass = _load_symbols(symbols, classes, start, count, lane)
    entry, reciprocal, unknown = _load_entries(symbol, klass, start, count, entries, tables, lane)
    # Symbols are on their way for three steps before their entries can be asked for.
    symbol, klass = _load_symbols(symbols, classes, start - LANES, count, lane)
    symbol_2, klass_2 = _load_symbols(symbols, classes, start - 2 * LANES, count, lane)
    symbol_3, klass_3 = _load_symbols(symbols, classes, start - 3 * LANES, count, lane)
    while start >= 0:
        inside = start + lane < count
        below_f = entry & 0xFFF
        offset = (entry >> 12) & 0xFFF
        bad |= ((entry >> 31) | unknown.to(tl.uint32)).to(tl.int32)
        inverse = reciprocal
        # Nothing of the next step's entries depends on the states.
        entry, reciprocal, unknown = _load_entries(symbol, klass, start - LANES, count, entries, tables, lane)
        symbol, klass, symbol_2, klass_2 = symbol_2, klass_2, symbol_3, klass_3
        symbol_3, klass_3 = _load_symbols(symbols, classes, start - 4 * LANES, count, lane)
        full = inside & ((x >> (31 - BITS)) > below_f)
        chosen = bits_of(full, lane)
        top -= ones(chosen)
        place = top + below(chosen, lane)
        tl.store(words + place, (x & 0xFFFF).to(tl.uint16), mask=full & (place >= HEADER_WORDS))
        top = tl.maximum(top, HEADER_WORDS - 1)
        x = tl.where(full, x >> 16, x)
        # inverse = floor((2^32 - 1) / f) and x < 2^31: the quotient is right or one too small.
        quotient = tl.umulhi(x, inverse)
        rest = x - quotient * (below_f + 1)
        coded = (quotient << BITS) + rest + offset
        coded = tl.where(rest > below_f, coded + (1 << BITS) - (below_f + 1), coded)
        x = tl.where(inside, coded, x)
        start -= LANES
    return x, top, tl.max(bad, axis=0) == 0


@triton.jit(do_not_specialize=["out_bytes", "parts", "tables"])
def encode_kernel(
    symbols,  # bytes
    classes,  # bytes
    places,  # [streams, parts, 2] int64: of classes and symbols alike
    parts: "i32",  # noqa: F821
    entries,  # [tables, 256, 2] int32: as csrc/rans/rans.h has them, and floor((2^32 - 1) / frequency)
    tables: "i32",  # noqa: F821
    out,  # bytes, at an even address
    out_bytes: "i64",  # noqa: F821
    rooms,  # [streams, 2] int64: first byte, bytes; both even
    streams,  # [streams, 2] int64, set: first byte, bytes; no bytes where the status is not 0
    after,  # [streams, parts] int64, set: bytes of the stream that follow a part's words
    status,  # [streams] int32, set
    BITS: tl.constexpr,
):
    """Grid (streams,)."""
    number = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    begin = tl.load(rooms + 2 * number + FIRST)
    size = tl.load(rooms + 2 * number + COUNT)
    possible = within(begin, size, out_bytes)
    begin = tl.where(possible, begin, 0)
    room = tl.where(possible, size, 0).to(tl.int32) // 2
    words = (out + begin).to(tl.pointer_type(tl.uint16))
    top = tl.maximum(room, HEADER_WORDS - 1)
    x = tl.full((LANES,), LOW, tl.uint32)
    good = top > 0  # so far
    some = top * 0
    part = parts - 1
    while part >= 0:
        index = number * parts + part
        first = tl.load(places + 2 * index + FIRST)
        count = tl.load(places + 2 * index + COUNT).to(tl.int32)
        tl.store(after + index, 2 * (room - top).to(tl.int64))
        x, top, well = encode_part(x, top, words, symbols + first, classes + first, count, entries, tables, lane, BITS)
        good &= well
        some |= (count > 0).to(tl.int32)
        part -= 1
    fits = (top >= HEADER_WORDS) | (some == 0)
    there = good & fits & (some != 0)
    size = tl.where(there, 2 * (room - top + HEADER_WORDS), 0)
    head = tl.where(there, top - HEADER_WORDS, 0)
    written = lane * 0 + size > 0
    tl.store(words + head + 2 * lane, (x & 0xFFFF).to(tl.uint16), mask=written)
    tl.store(words + head + 2 * lane + 1, (x >> 16).to(tl.uint16), mask=written)
    tl.store(streams + 2 * number + FIRST, begin + 2 * head)
    tl.store(streams + 2 * number + COUNT, size.to(tl.int64))
    tl.store(status + number, tl.where(good, tl.where(fits, 0, NO_ROOM), BAD_SYMBOL))
