# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""splitzip, encoding: one pass over the input, one program a chunk, all layers of a block in one launch.

A chunk's escapes follow those of the chunks before it. Their sum comes from a decoupled look-back (Merrill and Garland,
2016): each program publishes its own bytes, then reads those of its predecessors, many at once, back to the nearest
that already knows the sum of all before it. Chunks are handed out by a ticket, so a predecessor has always begun and
cannot be waiting for a free multiprocessor. Nothing here depends on the order in which programs run: the bytes are the
reference's.
"""

import triton
import triton.language as tl

from kvstore.codecs.splitzip.kernels.chunks import (
    CHUNK,
    CODES,
    COLUMNS,
    FIRST_STATE,
    GROUP,
    PAYLOAD,
    known_bytes,
    layer_chunks,
    layer_values,
    locate,
    planes,
    pointers,
    raw_bytes,
    whole,
)

# A state is one 64-bit word, so that it is read whole without fences: what is known of the chunk, its bytes of escapes
# (up to 2^32), and above them the chunks stored raw. A cleared word says that nothing is known.
OWN, TOTAL = tl.constexpr(1), tl.constexpr(2)
FLAG_BITS, RAW_SHIFT = tl.constexpr(2), tl.constexpr(32)
BYTES_MASK = tl.constexpr((1 << 32) - 1)
SLICE = tl.constexpr(1024)  # values of a chunk looked at together for escapes
EXPONENTS_LOG2 = tl.constexpr(8)


@triton.jit
def _exponent(value, LOW_BYTES: tl.constexpr, REST_BITS: tl.constexpr):
    if REST_BITS == 8:
        return (value >> (8 * LOW_BYTES + 7)) & 0xFF
    return (value >> (8 * LOW_BYTES + 2)) & 0x1F


@triton.jit
def _rest(value, LOW_BYTES: tl.constexpr, REST_BITS: tl.constexpr):
    """Sign, then mantissa bits, of the head: what is above the low plane."""
    head = value >> (8 * LOW_BYTES)
    if REST_BITS == 8:
        return ((head >> 8) & 0x80) | (head & 0x7F)
    return ((head >> 5) & 4) | (head & 3)


@triton.jit
def _window(top, any_zero):
    """Base of the window whose highest exponent is `top`, and 1 where code 0 stands for exponent 0."""
    base = tl.maximum(top, CODES - 1) - (CODES - 1)
    return base, tl.where((base > 0) & any_zero, 1, 0)


@triton.jit
def _escaped(exponent, base, zero, valid):
    # Exponent 0 has code 0 where `zero` is 1, and is like any other where it is 0. What lies below the window is large
    # as an unsigned number.
    beyond = (exponent - (base + zero)).to(tl.uint32, bitcast=True) >= (-zero + CODES).to(tl.uint32)
    return valid & (exponent >= zero) & beyond


@triton.jit
def _robust_top(exponent, valid, count):
    """The smallest exponent above which at most a 32nd of the values lie: a binary search, in rare chunks only."""
    low, high = count * 0, count * 0 + 255
    for _ in range(EXPONENTS_LOG2):
        middle = (low + high) // 2
        above = tl.sum((valid & (exponent > middle)).to(tl.int32))
        enough = above <= (count >> 5)
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, tl.minimum(middle + 1, 255))
    return high


@triton.jit
def _before(states, number, LOOK: tl.constexpr):
    """Escapes of all chunks before `number`, as a word without flag. Waits for those that have begun and not said yet.

    LOOK is the number of threads: with one word each, no two threads read the same word and see it differently.
    """
    total = number.to(tl.int64) * 0
    end = number
    lane = tl.arange(0, LOOK)
    while end > 0:
        at = end - LOOK + lane
        # Before the first chunk everything is known: nothing.
        word = tl.load(states + at, mask=at >= 0, other=TOTAL, volatile=True)
        flag = (word & 3).to(tl.int32)
        # The nearest predecessor that has said more or less than its own bytes decides.
        nearest = tl.max(tl.where(flag == OWN, -1, 2 * lane + (flag == TOTAL).to(tl.int32)))
        if (nearest < 0) | ((nearest & 1) == 1):
            total += tl.sum(tl.where(lane >= (nearest >> 1), word >> FLAG_BITS, 0))
            end = tl.where(nearest < 0, end - LOOK, 0)
    return total


@triton.jit
def _store_pairs(target, nibbles, count):
    """Two 4-bit values a byte, the first in the low half; count: a multiple of 32."""
    low, high = tl.split(tl.reshape(nibbles, (CHUNK // 2, 2)))
    lane = tl.arange(0, CHUNK // 2)
    tl.store(target + lane, (low | (high << 4)).to(tl.uint8), mask=lane < whole(count // 2, 16))


@triton.jit
def _store_bits(target, rest, count):
    """3-bit values as three words of 32 bits per 32 values, lowest bits first."""
    groups = tl.reshape(rest, (CHUNK // GROUP, GROUP))
    shift = tl.arange(0, GROUP)[None, :]
    words = target.to(tl.pointer_type(tl.int32)) + 3 * tl.arange(0, CHUNK // GROUP)
    within = tl.arange(0, CHUNK // GROUP) * GROUP < count
    for bit in tl.static_range(3):
        tl.store(words + bit, tl.sum(((groups >> bit) & 1) << shift, axis=1), mask=within)


# The last two read the values anew, out of the cache and a slice at a time: kept in registers the values, and the
# addresses of their escapes, would take the place of other programs, which hide the waiting. (`while`, for there are
# interpreters that cannot make a range of a tensor.)


@triton.jit
def _store_raw(
    target,
    address,
    token_stride,
    dim,
    first,
    count,
    TYPE: tl.constexpr,
    LOW_BYTES: tl.constexpr,
    REST_BITS: tl.constexpr,
    DIM: tl.constexpr,
):
    """What of each exponent is above its 4-bit code: two a byte, or, where exponents have five bits, eight."""
    A_BYTE: tl.constexpr = 2 if REST_BITS == 8 else 8
    start = count * 0
    while start < raw_bytes(count, REST_BITS):
        byte = start + tl.arange(0, SLICE)
        packed = tl.zeros((SLICE,), tl.int32)
        for part in tl.static_range(A_BYTE):
            position = byte * A_BYTE + part
            source = pointers(address, token_stride, dim, first, position, TYPE, DIM, False)
            value = tl.load(source, mask=position < count, other=0).to(tl.int32)
            packed |= (_exponent(value, LOW_BYTES, REST_BITS) >> 4) << (8 // A_BYTE * part)
        tl.store(target + byte, packed.to(tl.uint8), mask=byte < raw_bytes(count, REST_BITS))
        start += SLICE


@triton.jit
def _list_escapes(
    target,
    base,
    zero,
    address,
    token_stride,
    dim,
    first,
    count,
    TYPE: tl.constexpr,
    LOW_BYTES: tl.constexpr,
    REST_BITS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Three bytes an escape: its position in the chunk, two bytes, and its exponent."""
    start = count * 0
    while start < count:
        position = start + tl.arange(0, SLICE)
        source = pointers(address, token_stride, dim, first, position, TYPE, DIM, False)
        value = tl.load(source, mask=position < count, other=0).to(tl.int32)
        exponent = _exponent(value, LOW_BYTES, REST_BITS)
        escaped = _escaped(exponent, base, zero, position < count)
        found = tl.sum(escaped.to(tl.int32))
        if found > 0:
            place = target + 3 * (tl.cumsum(escaped.to(tl.int32), 0) - 1)
            tl.store(place, position.to(tl.uint8), mask=escaped)
            tl.store(place + 1, (position >> 8).to(tl.uint8), mask=escaped)
            tl.store(place + 2, exponent.to(tl.uint8), mask=escaped)
        target += 3 * found
        start += SLICE


@triton.jit
def _finish(row, out, size_of, chunks, total, LOW_BYTES: tl.constexpr, REST_BITS: tl.constexpr):
    """Header, padding and size of a layer; total: the word of all its chunks, without flag."""
    begin = out + tl.load(row + PAYLOAD)
    values = layer_values(row)
    end = total & BYTES_MASK
    word = tl.arange(0, 4)
    header = tl.where(word == 0, 1, tl.where(word == 1, chunks, tl.where(word == 2, end, total >> RAW_SHIFT)))
    tl.store(begin.to(tl.pointer_type(tl.int32)) + word, header.to(tl.int32))
    size = known_bytes(values, chunks, LOW_BYTES, REST_BITS) + end
    padded = tl.cdiv(size, 16) * 16
    padding = tl.arange(0, 16)
    tl.store(begin + size + padding, tl.zeros((16,), tl.uint8), mask=padding < padded - size)
    tl.store(size_of, padded)


@triton.jit
def _choose(exponent, valid, count, REST_BITS: tl.constexpr):
    """(base, zero, escapes, whether the chunk is raw): the window of a chunk. See `window` in the reference."""
    # With the largest exponent as its top, what escapes is what lies below.
    top = tl.max(exponent)
    least = tl.min(tl.where(valid, exponent, 255))
    base, zero = _window(top, least == 0)
    escapes = tl.sum(_escaped(exponent, base, zero, valid).to(tl.int32))
    if escapes > (count >> 6):
        base, zero = _window(_robust_top(exponent, valid, count), least == 0)
        escapes = tl.sum(_escaped(exponent, base, zero, valid).to(tl.int32))
    raw = 3 * escapes >= tl.maximum(raw_bytes(count, REST_BITS), 1)
    return tl.where(raw, 0, base), tl.where(raw, 0, zero), escapes, raw


@triton.jit
def _store_planes(
    codes, rest_plane, low_plane, place, value, code, raw, padded, LOW_BYTES: tl.constexpr, REST_BITS: tl.constexpr
):
    """What of the values is not in their escapes. codes: pointer to the chunk's codes; padded: values, whole groups."""
    lane = tl.arange(0, CHUNK)
    inside = lane < padded
    # Where the chunk is raw, base is 0 and the low half of every exponent is kept. Beyond the values all is 0.
    fits = code.to(tl.uint32, bitcast=True) < tl.where(raw, 256, CODES).to(tl.uint32)
    _store_pairs(tl.multiple_of(codes, 16), tl.where(fits, code & 15, 0), padded)
    rest = _rest(value, LOW_BYTES, REST_BITS)
    if REST_BITS == 8:
        tl.store(tl.multiple_of(rest_plane + place, 16) + lane, rest.to(tl.uint8), mask=inside)
    else:
        _store_bits(tl.multiple_of(rest_plane + place // 8 * 3, 4), rest, padded)
    if LOW_BYTES == 1:
        tl.store(tl.multiple_of(low_plane + place, 4) + lane, value.to(tl.uint8), mask=inside)
    if LOW_BYTES == 2:
        low_target = (low_plane + 2 * place).to(tl.pointer_type(tl.uint16))
        tl.store(tl.multiple_of(low_target, 16) + lane, value.to(tl.uint16), mask=inside)


@triton.jit
def encode_kernel(
    table,  # [layers, COLUMNS] int64
    work,  # [layers + chunks] int64, zero: tickets, then states
    out,  # bytes
    sizes,  # [layers] int64
    TYPE: tl.constexpr,  # unsigned integer of the dtype's width
    LOW_BYTES: tl.constexpr,
    REST_BITS: tl.constexpr,
    DIM: tl.constexpr,
    ALIGNED: tl.constexpr,
    LOOK: tl.constexpr,  # threads of a program
):
    """Grid (most chunks of a layer, layers). Writes each layer to `out` at its offset, its bytes to `sizes`."""
    layer = tl.program_id(1)
    row = table + layer * COLUMNS
    chunks = layer_chunks(row)
    number = tl.atomic_add(work + layer, 1, sem="relaxed").to(tl.int32)
    if number >= tl.maximum(chunks, 1):
        return
    address, token_stride, dim, first, count, _, place = locate(row, number, TYPE.primitive_bitwidth // 8, ALIGNED)
    lane = tl.arange(0, CHUNK)
    valid = lane < count
    source = pointers(address, token_stride, dim, first, lane, TYPE, DIM, ALIGNED)
    value = tl.load(source, mask=valid, other=0).to(tl.int32)
    exponent = _exponent(value, LOW_BYTES, REST_BITS)
    base, zero, escapes, raw = _choose(exponent, valid, count, REST_BITS)
    own = tl.where(raw, raw_bytes(count, REST_BITS), 3 * escapes).to(tl.int64) | (raw.to(tl.int64) << RAW_SHIFT)

    # Successors wait for this, so it comes before anything is written.
    states = work + tl.load(row + FIRST_STATE)
    flag = tl.where(number == 0, TOTAL, OWN)
    tl.atomic_xchg(states + number, (own << FLAG_BITS) | flag, sem="relaxed")

    begin, rest_plane, low_plane, ends, bases = planes(out, row, layer_values(row), chunks, LOW_BYTES, REST_BITS)
    padded = tl.cdiv(count, GROUP) * GROUP
    codes = begin + 16 + place // 2
    _store_planes(codes, rest_plane, low_plane, place, value, exponent - base, raw, padded, LOW_BYTES, REST_BITS)

    before = _before(states, number, LOOK)
    total = before + own
    if number > 0:
        tl.atomic_xchg(states + number, (total << FLAG_BITS) | TOTAL, sem="relaxed")
    end = total & BYTES_MASK
    some = chunks > 0
    tl.store(ends.to(tl.pointer_type(tl.int32)) + number, (end | (zero.to(tl.int64) << 31)).to(tl.int32), mask=some)
    tl.store(bases + number, base.to(tl.uint8), mask=some)
    place_of_escapes = bases + chunks + (before & BYTES_MASK)
    if raw:
        _store_raw(place_of_escapes, address, token_stride, dim, first, count, TYPE, LOW_BYTES, REST_BITS, DIM)
    elif escapes > 0:
        _list_escapes(
            place_of_escapes, base, zero, address, token_stride, dim, first, count, TYPE, LOW_BYTES, REST_BITS, DIM
        )
    if number >= chunks - 1:
        _finish(row, out, sizes + layer, chunks, total, LOW_BYTES, REST_BITS)
