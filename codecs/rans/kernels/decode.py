# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""rANS, decoding: one program of one warp a stream; the format is in csrc/rans/rans.h.

Nothing that a stream or the classes say leads out of their arrays: words beyond the end are zeros, classes without a
table are replaced, and the status tells.
"""

import triton
import triton.language as tl

from kvstore.codecs.rans.kernels.lanes import COUNT, FIRST, HEADER_WORDS, LANES, LOW, below, bits_of, ones, within

# Columns of a stream's state, after those of its lanes: words taken, of the whole stream, and flags.
TAKEN = tl.constexpr(32)
FLAGS = tl.constexpr(33)
STATE_COLUMNS = tl.constexpr(34)
DAMAGED = tl.constexpr(1)
ANY = tl.constexpr(2)  # there were symbols


@triton.jit
def decode_part(x, taken, total, words, classes, symbols, count, slots, tables, lane, BITS: tl.constexpr):
    """Decodes `count` symbols: (states, words taken, whether all was well so far).

    x: uint32 `[LANES]` states, each below 2^31; words: of `total`, of which `taken` are; classes, symbols: pointers to
    the part's; symbols is written. `taken` goes to total + 1, no further, where the words do not suffice.
    """
    unknown = tl.zeros((LANES,), tl.int32)
    following = tl.load(classes + lane, mask=lane < count, other=0)
    start = 0
    while start < count:
        inside = start + lane < count
        klass = following.to(tl.int32)
        # What does not depend on the states is loaded while these are waited for.
        following = tl.load(classes + start + LANES + lane, mask=start + LANES + lane < count, other=0)
        window = tl.load(words + taken + lane, mask=taken + lane < total, other=0).to(tl.uint32)
        unknown |= (klass >= tables).to(tl.int32)
        klass = tl.minimum(klass, tables - 1)
        entry = tl.load(slots + (klass << BITS) + (x & ((1 << BITS) - 1)).to(tl.int32)).to(tl.uint32, bitcast=True)
        tl.store(symbols + start + lane, (entry & 0xFF).to(tl.uint8), mask=inside)
        y = (((entry >> 8) & 0xFFF) + 1) * (x >> BITS) + (entry >> 20)
        low = inside & (y < LOW)
        chosen = bits_of(low, lane)
        word = tl.gather(window, below(chosen, lane), 0)
        y = tl.where(low, (y << 16) | word, y)
        x = tl.where(inside, y, x)
        taken = tl.minimum(taken + ones(chosen), total + 1)
        start += LANES
    return x, taken, (tl.max(unknown, axis=0) == 0) & (taken <= total)


@triton.jit
def resume(payload, payload_bytes, streams, state, number, lane):
    """Where a stream was left, or its begin: (states, words taken, of so many, pointer to words, flags, soundness).

    payload .. state: as in `decode_kernel`.
    """
    begin = tl.load(streams + 2 * number + FIRST)
    size = tl.load(streams + 2 * number + COUNT)
    good = within(begin, size, payload_bytes) & ((size == 0) | ((size >= 2 * HEADER_WORDS) & (size % 2 == 0)))
    begin = tl.where(good, begin, 0)
    total = tl.where(good, size, 0).to(tl.int32) // 2
    words = (payload + begin).to(tl.pointer_type(tl.uint16))

    state += number * STATE_COLUMNS
    taken = tl.load(state + TAKEN)
    flags = tl.load(state + FLAGS)
    every = tl.zeros((LANES,), tl.int32)
    fresh = (every + taken == 0) & (every + total > 0)
    x = tl.load(state + lane, mask=every + taken > 0, other=LOW).to(tl.uint32)
    low_half = tl.load(words + 2 * lane, mask=fresh, other=0).to(tl.uint32)
    high_half = tl.load(words + 2 * lane + 1, mask=fresh, other=0).to(tl.uint32)
    x = tl.where(fresh, low_half | (high_half << 16), x)
    possible = (x >= LOW) & (x < 1 << 31)
    good &= tl.min(possible.to(tl.int32), axis=0) != 0
    x = tl.where(possible, x, LOW)
    taken = tl.where((taken == 0) & (total > 0), HEADER_WORDS, taken)
    return x, taken, total, words, flags, good


@triton.jit
def leave(x, taken, total, flags, good, state, status, number, lane):
    """Keeps where a stream is left; its status is 0 if it may end here."""
    flags |= tl.where(good, 0, DAMAGED)
    state += number * STATE_COLUMNS
    tl.store(state + lane, x.to(tl.int32))
    tl.store(state + TAKEN, taken)
    tl.store(state + FLAGS, flags)
    at_rest = tl.min((x == LOW).to(tl.int32), axis=0) != 0
    ends = at_rest & (taken == total) & (flags == tl.where(total > 0, ANY, 0))
    tl.store(status + number, tl.where(ends, 0, 1))


@triton.jit(do_not_specialize=["payload_bytes", "parts", "tables"])
def decode_kernel(
    payload,  # bytes, at an even address
    payload_bytes: "i64",  # noqa: F821
    streams,  # [streams, 2] int64: first byte, bytes
    places,  # [streams, parts, 2] int64: of classes and symbols alike
    parts: "i32",  # noqa: F821
    slots,  # [tables, 2^BITS] int32, as csrc/rans/rans.h has them
    tables: "i32",  # noqa: F821
    classes,  # bytes
    symbols,  # bytes, written
    state,  # [streams, STATE_COLUMNS] int32, zeros before the first parts; mutated
    status,  # [streams] int32, set: 0 where a stream ends here as it should
    BITS: tl.constexpr,
):
    """Grid (streams,): the next `parts` parts of each."""
    number = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    x, taken, total, words, flags, good = resume(payload, payload_bytes, streams, state, number, lane)
    part = 0
    while part < parts:
        place = places + 2 * (number * parts + part)
        first = tl.load(place + FIRST)
        count = tl.load(place + COUNT).to(tl.int32)
        x, taken, well = decode_part(
            x, taken, total, words, classes + first, symbols + first, count, slots, tables, lane, BITS
        )
        good &= well & ((count <= 0) | (total > 0))
        flags |= tl.where(count > 0, ANY, 0)
        part += 1
    leave(x, taken, total, flags, good, state, status, number, lane)
