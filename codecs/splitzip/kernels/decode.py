# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""splitzip, decoding: one pass, one program a chunk, straight into the slices of a cache.

Every address is derived from the table, never from the payload, and every place that the payload names is checked: a
hostile payload makes wrong values, not wrong accesses.
"""

import triton
import triton.language as tl

from kvstore.codecs.splitzip.kernels.chunks import (
    CHUNK,
    COLUMNS,
    GROUP,
    PAYLOAD_BYTES,
    known_bytes,
    layer_chunks,
    layer_values,
    locate,
    planes,
    pointers,
    raw_bytes,
)

END_MASK = tl.constexpr((1 << 31) - 1)
ESCAPES = tl.constexpr(128)  # patched at once; a chunk of real caches has a handful


@triton.jit
def _load_nibbles(source, size):
    """`[CHUNK]` int32 from the first `size` bytes at `source`, the low half of a byte first; zero beyond."""
    lane = tl.arange(0, CHUNK // 2)
    packed = tl.load(source + lane, mask=lane < size, other=0).to(tl.int32)
    return tl.interleave(packed & 15, packed >> 4)


@triton.jit
def _load_bits(source, count):
    """The inverse of the encoder's 3-bit planes: `[CHUNK]` int32."""
    within = tl.arange(0, CHUNK // GROUP) * GROUP < count
    words = source.to(tl.pointer_type(tl.int32)) + 3 * tl.arange(0, CHUNK // GROUP)
    shift = tl.arange(0, GROUP)[None, :]
    rest = tl.zeros((CHUNK // GROUP, GROUP), tl.int32)
    for bit in tl.static_range(3):
        rest |= ((tl.load(words + bit, mask=within, other=0)[:, None] >> shift) & 1) << bit
    return tl.reshape(rest, (CHUNK,))


@triton.jit
def _join(exponent, rest, low, TYPE: tl.constexpr, LOW_BYTES: tl.constexpr, REST_BITS: tl.constexpr):
    if REST_BITS == 8:
        head = ((rest & 0x80) << 8) | ((exponent & 0xFF) << 7) | (rest & 0x7F)
    else:
        head = ((rest & 4) << 5) | ((exponent & 0x1F) << 2) | (rest & 3)
    return ((head << (8 * LOW_BYTES)) | low).to(TYPE)


@triton.jit
def _escapes_of(row, number, begin, ends, values, chunks, most, LOW_BYTES: tl.constexpr, REST_BITS: tl.constexpr):
    """Of a chunk: (first byte of its escapes, their bytes, whether code 0 stands for exponent 0, whether any of it is
    wrong; of chunk 0, of the whole layer). most: bytes of a chunk that is stored raw."""
    room = tl.load(row + PAYLOAD_BYTES) - known_bytes(values, chunks, LOW_BYTES, REST_BITS)
    end_word = tl.load(ends + number)
    previous = tl.load(ends + tl.maximum(number - 1, 0))
    zero = end_word < 0  # the flag is the highest bit
    from_byte = tl.where(number > 0, previous & END_MASK, 0).to(tl.int64)
    to_byte = (end_word & END_MASK).to(tl.int64)
    size = to_byte - from_byte
    wrong = (size < 0) | (to_byte > room) | (size > most) | ((size % 3 != 0) & (size != most))
    if number == 0:
        header = begin.to(tl.pointer_type(tl.int32))
        escape_bytes = tl.load(header + 2).to(tl.int64)
        last = (tl.load(ends + chunks - 1) & END_MASK).to(tl.int64)
        wrong |= (tl.load(header) != 1) | (tl.load(header + 1) != chunks) | (escape_bytes != last)
        wrong |= escape_bytes > room
    return from_byte, size, zero, wrong


@triton.jit
def _load_planes(rest_plane, low_plane, place, padded, LOW_BYTES: tl.constexpr, REST_BITS: tl.constexpr):
    """Sign with mantissa bits, and low bytes, of the chunk from `place` on: `[CHUNK]` int32 each."""
    lane = tl.arange(0, CHUNK)
    # Accesses are whole groups wherever the format pads to them: only then are they wide.
    inside = lane < padded
    if REST_BITS == 8:
        rest = tl.load(tl.multiple_of(rest_plane + place, 16) + lane, mask=inside, other=0).to(tl.int32)
    else:
        rest = _load_bits(tl.multiple_of(rest_plane + place // 8 * 3, 4), padded)
    if LOW_BYTES == 1:
        low = tl.load(tl.multiple_of(low_plane + place, 4) + lane, mask=inside, other=0).to(tl.int32)
    elif LOW_BYTES == 2:
        low_source = tl.multiple_of((low_plane + 2 * place).to(tl.pointer_type(tl.uint16)), 16)
        low = tl.load(low_source + lane, mask=inside, other=0).to(tl.int32)
    else:
        low = 0
    return rest, low


@triton.jit
def _load_some(rest_plane, low_plane, place, position, within, LOW_BYTES: tl.constexpr, REST_BITS: tl.constexpr):
    """The same of the chunk's values at `position`, `[ESCAPES]`."""
    if REST_BITS == 8:
        rest = tl.load(rest_plane + place + position, mask=within, other=0).to(tl.int32)
    else:
        words = (rest_plane + place // 8 * 3 + (position // GROUP) * 12).to(tl.pointer_type(tl.int32))
        shift = position % GROUP
        rest = tl.zeros((ESCAPES,), tl.int32)
        for bit in tl.static_range(3):
            rest |= ((tl.load(words + bit, mask=within, other=0) >> shift) & 1) << bit
    if LOW_BYTES == 1:
        low = tl.load(low_plane + place + position, mask=within, other=0).to(tl.int32)
    elif LOW_BYTES == 2:
        low_source = tl.multiple_of((low_plane + 2 * place).to(tl.pointer_type(tl.uint16)), 16)
        low = tl.load(low_source + position, mask=within, other=0).to(tl.int32)
    else:
        low = 0
    return rest, low


@triton.jit
def _patch(
    escapes,
    size,
    damaged,
    rest_plane,
    low_plane,
    place,
    address,
    token_stride,
    dim,
    first,
    count,
    exist,
    TYPE: tl.constexpr,
    LOW_BYTES: tl.constexpr,
    REST_BITS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Writes the values that the chunk's `size` bytes of escapes name over those that their codes gave."""
    start = count * 0
    while start < size // 3:
        at = start + tl.arange(0, ESCAPES)
        within = at < size // 3
        source = escapes + 3 * at
        position = tl.load(source, mask=within, other=0).to(tl.int32)
        position |= tl.load(source + 1, mask=within, other=0).to(tl.int32) << 8
        patch = tl.load(source + 2, mask=within, other=0).to(tl.int32)
        tl.store(damaged + 0 * at, 1, mask=within & (position >= count))
        within &= position < count
        rest_of, low_of = _load_some(rest_plane, low_plane, place, position, within, LOW_BYTES, REST_BITS)
        fixed = _join(patch, rest_of, low_of, TYPE, LOW_BYTES, REST_BITS)
        index = first + position
        if DIM != -1:
            index = (index // dim) * token_stride + index % dim
        tl.store(address.to(tl.pointer_type(TYPE)) + index, fixed, mask=within & (position < exist))
        start += ESCAPES


@triton.jit
def decode_kernel(
    table,  # [layers, COLUMNS] int64
    payload,  # bytes
    damaged,  # [layers] int32, set to 1 where a layer is not what the encoder wrote
    TYPE: tl.constexpr,  # unsigned integer of the dtype's width
    LOW_BYTES: tl.constexpr,
    REST_BITS: tl.constexpr,
    DIM: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Grid (most chunks of a layer, layers). Each layer must have room for its planes, ends and bases."""
    number = tl.program_id(0)
    layer = tl.program_id(1)
    row = table + layer * COLUMNS
    chunks = layer_chunks(row)
    if number >= chunks:
        return
    address, token_stride, dim, first, count, exist, place = locate(row, number, TYPE.primitive_bitwidth // 8, ALIGNED)
    values = layer_values(row)
    begin, rest_plane, low_plane, ends, bases = planes(payload, row, values, chunks, LOW_BYTES, REST_BITS)
    ends = ends.to(tl.pointer_type(tl.int32))
    most = raw_bytes(count, REST_BITS)
    of_layer = (begin, ends, values, chunks)
    from_byte, size, zero, wrong = _escapes_of(row, number, *of_layer, most, LOW_BYTES, REST_BITS)
    raw = size == most
    escapes = bases + chunks + from_byte
    base = tl.load(bases + number).to(tl.int32)
    if wrong:
        tl.store(damaged + layer, 1)
        size = size * 0
        raw = size > 0

    lane = tl.arange(0, CHUNK)
    padded = tl.cdiv(count, GROUP) * GROUP
    code = _load_nibbles(tl.multiple_of(begin + 16 + place // 2, 16), padded // 2)
    rest, low = _load_planes(rest_plane, low_plane, place, padded, LOW_BYTES, REST_BITS)
    exponent = tl.where(zero & (code == 0), 0, code + base)
    if raw:
        if REST_BITS == 8:
            high = _load_nibbles(escapes, most)
        else:
            high = (tl.load(escapes + lane // 8, mask=lane < count, other=0).to(tl.int32) >> (lane % 8)) & 1
        exponent = code | (high << 4)
    target = pointers(address, token_stride, dim, first, lane, TYPE, DIM, ALIGNED)
    tl.store(target, _join(exponent, rest, low, TYPE, LOW_BYTES, REST_BITS), mask=lane < exist)

    if (size > 0) & (raw == 0):
        # The patches overwrite what other threads have just stored.
        tl.debug_barrier()
        of_planes = (rest_plane, low_plane, place)
        of_tensor = (address, token_stride, dim, first, count, exist)
        _patch(escapes, size, damaged + layer, *of_planes, *of_tensor, TYPE, LOW_BYTES, REST_BITS, DIM)
