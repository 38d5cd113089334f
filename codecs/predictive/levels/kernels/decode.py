# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""From the stream to the values of a part: one launch, a program a block, group after group.

A group is predicted from the values of the groups before it, and what a symbol leaves open lies behind that of all
values before, so that nothing of a block's next group can begin earlier. Nothing that a payload says leads out of it:
raw bits and escapes beyond a part's are zeros, and totals tell.
"""

import triton
import triton.language as tl

from kvstore.codecs.predictive.kernels.axis import (
    ESCAPE,
    EXIST,
    OFFSET,
    PLACE_COLUMNS,
    TOKEN_STRIDE,
    adapt,
    bins,
    energy,
    load_bits,
    octaves,
    raw_count,
    row_of_tensor,
    signed_index,
)
from kvstore.codecs.predictive.kernels.decode import (
    ESCAPE_COUNT,
    ESCAPES,
    RAW,
    RAW_BYTES,
    SECTION_COLUMNS,
    escaped_bits,
    magnitude_of,
    raw_word,
)
from kvstore.codecs.predictive.levels.kernels.groups import GROUP, give, in_head, predict_tile, predicted
from kvstore.codecs.rans.kernels.decode import ANY, decode_part, leave, resume
from kvstore.codecs.rans.kernels.lanes import LANES

# Rows of `found` [FOUND, parts, blocks] int32: what a part of a block came to.
RAW_BITS, ESCAPED, BAD, SUM, WEIGHTED = (tl.constexpr(i) for i in range(5))
FOUND = tl.constexpr(5)


@triton.jit
def tile_of(at, lane, count, begin, width):
    """Of a flat tile: (row of the block, column of the part, place in the group, whether they exist)."""
    columns = tl.minimum(width - begin, GROUP)
    row = (at + lane) // GROUP
    of_group = lane % GROUP
    return row, begin + of_group, row * columns + of_group, (row < count) & (of_group < columns)


@triton.jit
def _classify(
    p, mu, classes, known, begin, width, first_class, TILE: tl.constexpr, DIM: tl.constexpr, ROTATE: tl.constexpr
):
    """Predictions of a group in fixed point to their bits and classes."""
    first, count, scale, offsets, from_fixed, cos, sin = known
    lane = tl.arange(0, TILE)
    at = 0
    while at < count * GROUP:
        row, column, place, inside = tile_of(at, lane, count, begin, width)
        own = tl.load(p + at + lane, mask=inside, other=0).to(tl.int32)
        across = tl.load(p + (at + lane ^ 1), mask=inside, other=0).to(tl.int32)
        bits = predicted(own, across, first + row, column, inside, from_fixed, cos, sin, DIM, ROTATE)
        offset = tl.load(offsets + row, mask=inside, other=0)
        linear, quarter = bins(tl.load(scale + column, mask=inside, other=0), offset)
        tl.store(mu + at + lane, bits.to(tl.int16), mask=inside)
        klass = first_class + 4 * octaves(bits, linear) + quarter
        tl.store(classes + place, klass.to(tl.uint8), mask=inside)
        at += TILE


@triton.jit
def _bins_of(symbols, mu, known, at, row, column, place, inside, begin, sizes, TILE: tl.constexpr):
    """(signed bins, linear exponents, whether symbols are escapes) of a flat tile; sizes are added to the rows'."""
    _first, count, scale, offsets, _from_fixed, _cos, _sin = known
    symbol = tl.load(symbols + place, mask=inside, other=OFFSET).to(tl.int32)
    bits = load_bits(mu + at + tl.arange(0, TILE), inside)
    offset = tl.load(offsets + row, mask=inside, other=0)
    linear, quarter = bins(tl.load(scale + column, mask=inside, other=0), offset)
    far = symbol == ESCAPE
    size = tl.where(far, 255, energy(symbol - OFFSET, octaves(bits, linear), quarter))
    size = tl.sum(tl.reshape(tl.where(inside, size, 0), (TILE // GROUP, GROUP)), axis=1)
    of_row = at // GROUP + tl.arange(0, TILE // GROUP)
    size += tl.load(sizes + of_row, mask=of_row < tl.where(begin > 0, count, 0), other=0)
    tl.store(sizes + of_row, size, mask=of_row < count)
    return signed_index(bits, linear) + symbol - OFFSET, linear, far


@triton.jit
def _values_of(i, linear, far, inside, section, bits_done, escapes_done):
    """(values, whether each is none, raw bits and escapes that are taken by now). section: where both are, and how
    many."""
    raw, raw_bytes, escapes, escape_count = section
    index = tl.where(i < 0, -1 - i, i)
    count = tl.where(inside & ~far, raw_count(index), 0)
    bit = bits_done + tl.cumsum(count, axis=0) - count
    rest = (raw_word(raw, raw_bytes, bit, count > 0) >> (bit & 7)) & ((1 << count) - 1)
    magnitude, escaped = magnitude_of(index, linear, count, rest)
    whole = inside & (far | escaped)
    wrong = inside & ~whole & ((magnitude > 0x7FFF) | (magnitude < 128))
    rank = escapes_done + tl.cumsum(whole.to(tl.int32), axis=0) - 1
    value = (magnitude & 0x7FFF) | tl.where(i < 0, 0x8000, 0)
    value = tl.where(whole, escaped_bits(escapes, rank, whole & (rank < escape_count)), value)
    # A sum of bits would be counted in local memory.
    return value, wrong.to(tl.int32), bits_done + tl.sum(count, axis=0), tl.max(rank, axis=0) + 1


@triton.jit
def _give(
    p,
    values,
    known,
    begin,
    width,
    receivers,
    stride,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """What the values of a group give to others."""
    first, count, _scale, _offsets, _from_fixed, cos, sin = known
    to_fixed, gain, narrow, inputs, input_stride, residuals = receivers
    lane = tl.arange(0, TILE)
    at = 0
    while at < count * GROUP:
        row, column, _place, inside = tile_of(at, lane, count, begin, width)
        own = load_bits(values + at + lane, inside)
        across = load_bits(values + (at + lane ^ 1), inside)
        fixed_p = tl.load(p + at + lane, mask=inside, other=0).to(tl.int32)
        here = (own, across, fixed_p, first + row, column, inside)
        to = inputs + (first + row) * input_stride + column
        give(*here, to_fixed, gain, narrow, cos, sin, to, residuals, stride, DIM, ROTATE, GROUPED)
        at += TILE


@triton.jit
def section_of(payload, sections, index):
    section = sections + index * SECTION_COLUMNS
    raw = payload + tl.load(section + RAW)
    escapes = payload + tl.load(section + ESCAPES)
    return raw, tl.load(section + RAW_BYTES), escapes, tl.load(section + ESCAPE_COUNT)


@triton.jit
def predict_rows(
    sums,
    residuals,
    weight,
    stride,
    shift,
    p,
    first,
    count,
    begin,
    width,
    GROUPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`predict_tile` of all rows of a block."""
    at = 0
    while at < count:
        row = at + tl.arange(0, BLOCK_M)
        of_group = (shift, p, first + row, row < count, begin, width)
        predict_tile(sums, residuals, weight, stride, *of_group, GROUPED, BLOCK_M, BLOCK_K)
        at += BLOCK_M


@triton.jit
def read_group(
    symbols,
    mu,
    values,
    sizes,
    known,
    section,
    place,
    first,
    begin,
    width,
    before,
    bits_done,
    escapes_done,
    wrong,
    plain,
    weighted,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Symbols of a group to values, in `values` and where they belong: (bits_done .. weighted) with the group's."""
    count = known[1]
    target, head_stride = row_of_tensor(place, first * 0)
    token_stride = tl.load(place + TOKEN_STRIDE)
    exist = tl.load(place + EXIST)
    lane = tl.arange(0, TILE)
    at = 0
    while at < count * GROUP:
        row, column, number, inside = tile_of(at, lane, count, begin, width)
        i, linear, far = _bins_of(symbols, mu, known, at, row, column, number, inside, begin, sizes, TILE)
        value, none, bits_done, escapes_done = _values_of(i, linear, far, inside, section, bits_done, escapes_done)
        wrong |= none
        tl.store(values + at + lane, value.to(tl.int16), mask=inside)
        head, in_it = in_head(column, DIM, ROTATE)
        to = target + row * token_stride + head * head_stride + in_it
        tl.store(to, value.to(tl.int16), mask=inside & (row < exist))
        value = tl.where(inside, value, 0).to(tl.uint32)
        plain += value
        # Places of values in their layer, from 1.
        weighted += value * (count * (before + begin) + number + 1).to(tl.uint32)
        at += TILE
    return bits_done, escapes_done, wrong, plain, weighted


@triton.jit(do_not_specialize=["stream_bytes", "tables", "parts", "part", "rows", "blocks", "before", "first_class"])
def join_kernel(
    stream, stream_bytes: "i64", streams, slots, tables: "i32", state, status,  # noqa: F821
    payload, sections, firsts, places, found, sizes, classes, symbols,
    sums, weight, residuals, stride, shift, from_fixed, to_fixed, gain, narrow, scale, adapts, offsets, fits,
    cos, sin, p, mu, values, inputs, input_stride, input_column,
    parts: "i32", part: "i32", rows: "i32", blocks: "i32", width, before: "i32", first_class: "i32",  # noqa: F821
    GROUPED: tl.constexpr, DIM: tl.constexpr, ROTATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks,). As in groups.py; stream .. status as of `decode_kernel` of rANS, a part of it a group; sections
    as of `read_kernel`; sizes int32 [rows]; classes, symbols uint8 [rows * GROUP]; found int32 [FOUND, parts, blocks].
    """
    block, part = tl.program_id(0).to(tl.int64), part.to(tl.int64)
    rans_lane = tl.arange(0, LANES)
    first = tl.load(firsts + block)
    count = (tl.load(firsts + block + 1) - first).to(tl.int32)
    section = section_of(payload, sections, part * blocks + block)
    place = places + (part * blocks + block) * PLACE_COLUMNS
    known = (first, count, scale, offsets + part * rows + first, from_fixed, cos, sin)
    receivers = (to_fixed, gain, narrow, inputs + input_column, input_stride, residuals)
    here = first * GROUP
    x, taken, total, words, flags, good = resume(stream, stream_bytes, streams, state, block, rans_lane)
    bits_done, escapes_done, begin = count * 0, count * 0, count * 0
    wrong = tl.zeros((TILE,), tl.int32)
    plain, weighted = tl.zeros((TILE,), tl.uint32), tl.zeros((TILE,), tl.uint32)
    while begin < width:
        of_group = (first, count, begin, width)
        predict_rows(sums, residuals, weight, stride, shift, p, *of_group, GROUPED, BLOCK_M, BLOCK_K)
        tl.debug_barrier()  # here as below, values of other threads are read
        coded = count * tl.minimum(width - begin, GROUP)
        _classify(p + here, mu + here, classes + here, known, begin, width, first_class, TILE, DIM, ROTATE)
        tl.debug_barrier()
        of_part = (classes + here, symbols + here, coded, slots, tables)
        x, taken, well = decode_part(x, taken, total, words, *of_part, rans_lane, BITS)
        good &= well & (total > 0)
        tl.debug_barrier()
        of_block = (symbols + here, mu + here, values + here, sizes + first, known, section, place)
        so_far = (bits_done, escapes_done, wrong, plain, weighted)
        so_far = read_group(*of_block, first, begin, width, before, *so_far, TILE, DIM, ROTATE)
        bits_done, escapes_done, wrong, plain, weighted = so_far
        tl.debug_barrier()
        _give(p + here, values + here, known, begin, width, receivers, stride, TILE, DIM, ROTATE, GROUPED)
        tl.debug_barrier()
        begin += GROUP
    leave(x, taken, total, flags | tl.where(count > 0, ANY, 0), good, state, status, block, rans_lane)
    adapt_rows(sizes + first, first, count, width, part, rows, adapts, offsets, fits, BLOCK_M)
    so_far = (bits_done, escapes_done, wrong, plain, weighted)
    store_found(found + part * blocks + block, parts.to(tl.int64) * blocks, *so_far)


@triton.jit
def adapt_rows(sizes, first, count, width, part, rows, adapts, offsets, fits, BLOCK_M: tl.constexpr):
    at = 0
    while at < count:
        row = at + tl.arange(0, BLOCK_M)
        size = tl.load(sizes + row, mask=row < count, other=0)
        adapt(size, width, part, rows, first + row, adapts, offsets, fits, row < count)
        at += BLOCK_M


@triton.jit
def store_found(found, row, bits_done, escapes_done, wrong, plain, weighted):
    tl.store(found + RAW_BITS * row, bits_done)
    tl.store(found + ESCAPED * row, escapes_done)
    tl.store(found + BAD * row, tl.max(wrong, axis=0))
    tl.store(found + SUM * row, tl.sum(plain, axis=0).to(tl.int32, bitcast=True))
    tl.store(found + WEIGHTED * row, tl.sum(weighted, axis=0).to(tl.int32, bitcast=True))
