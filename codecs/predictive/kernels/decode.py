# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""From the symbols of a part to its values: three launches, a program a row, since what is left open of a value lies
behind that of all values before it, and whether it is an escape is known only once its raw bits are.

Nothing that a payload says leads out of it: raw bits and escapes beyond a part's are zeros, and totals tell.
"""

import triton
import triton.language as tl

from kvstore.codecs.predictive.kernels.axis import (
    ESCAPE,
    EXIST,
    OFFSET,
    PLACE_COLUMNS,
    adapt,
    add_to_sums,
    before_in_block,
    bins,
    energy,
    load_bits,
    make_inputs,
    octaves,
    raw_count,
    row_of_tensor,
    signed_index,
    store_sums,
)

# Columns of sections `[parts, blocks, SECTION_COLUMNS]` int64: what a part has in the payload besides its words.
RAW, RAW_BYTES, ESCAPES, ESCAPE_COUNT = (tl.constexpr(i) for i in range(4))
SECTION_COLUMNS = tl.constexpr(4)
AHEAD = tl.constexpr(64)  # rows of a block whose totals are added up at once


@triton.jit
def _bins_of(symbols, mu, scale, column, inside, offset):
    """(symbol, signed bin, linear exponent, quarter, prediction) of columns of a row, int32."""
    symbol = tl.load(symbols + column, mask=inside, other=OFFSET).to(tl.int32)
    predicted = load_bits(mu + column, inside)
    linear, quarter = bins(tl.load(scale + column, mask=inside, other=0), offset)
    return symbol, signed_index(predicted, linear) + symbol - OFFSET, linear, quarter, predicted


@triton.jit
def raw_word(raw, raw_bytes, bit, there):
    """The three bytes that the raw bits of a value lie in, int32; bytes beyond `raw_bytes` are zeros."""
    byte = (bit >> 3).to(tl.int64)
    word = tl.load(raw + byte, mask=there & (byte < raw_bytes), other=0).to(tl.int32)
    word |= tl.load(raw + byte + 1, mask=there & (byte + 1 < raw_bytes), other=0).to(tl.int32) << 8
    word |= tl.load(raw + byte + 2, mask=there & (byte + 2 < raw_bytes), other=0).to(tl.int32) << 16
    return word


@triton.jit
def magnitude_of(index, linear, count, rest):
    """(bits without the sign of the value in a bin whose `count` raw bits are `rest`, whether it is an escape)."""
    gap = rest & 7
    deep = index == 0
    above = index - 128 + (linear << 7)
    below = ((linear - count) << 7) | ((index << count) & 127) | rest
    magnitude = tl.where(deep, ((linear - 8 - gap) << 7) | (rest >> 3), tl.where(index >= 128, above, below))
    return magnitude, deep & (gap == 7)


@triton.jit
def escaped_bits(source, rank, there):
    """bf16 bits of escape number `rank`, int32."""
    byte = source + 2 * rank.to(tl.int64)
    bits = tl.load(byte, mask=there, other=0).to(tl.int32)
    return bits | tl.load(byte + 1, mask=there, other=0).to(tl.int32) << 8


@triton.jit(do_not_specialize=["part", "rows"])
def measure_kernel(
    symbols,  # [rows, width] uint8
    mu,  # [rows, width] int16
    scale,  # [width] int16
    adapts,  # [parts + 1, 3] int32
    offsets,  # [parts + 1, rows] int32: of the next part are set
    fits,  # [parts + 2, rows] int32: of this part are set
    raw_bits,  # [parts, rows] int32: of this part are set
    part: "i32",  # noqa: F821
    rows: "i32",  # noqa: F821
    width,
    TILE: tl.constexpr,
):
    """Grid (rows,): how many raw bits a row has, and how large its residuals were."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    symbols += row * width
    mu += row * width
    part = part.to(tl.int64)
    offset = tl.load(offsets + part * rows + row)
    counts = tl.zeros((TILE,), tl.int32)
    sizes = tl.zeros((TILE,), tl.int32)
    at = 0
    while at < width:
        column = at + lane
        inside = column < width
        symbol, i, linear, quarter, predicted = _bins_of(symbols, mu, scale, column, inside, offset)
        far = symbol == ESCAPE
        index = tl.where(i < 0, -1 - i, i)
        counts += tl.where(inside & ~far, raw_count(index), 0)
        size = energy(symbol - OFFSET, octaves(predicted, linear), quarter)
        sizes += tl.where(inside, tl.where(far, 255, size), 0)
        at += TILE
    tl.store(raw_bits + part * rows + row, tl.sum(counts, axis=0))
    adapt(tl.sum(sizes, axis=0), width, part, rows, row, adapts, offsets, fits)


@triton.jit(do_not_specialize=["part", "rows", "blocks"])
def read_kernel(
    payload,
    sections,  # [parts, blocks, SECTION_COLUMNS] int64
    block_of,  # [rows] int32
    firsts,  # [blocks + 1] int64: first row of each block
    symbols,  # [rows, width] uint8, mutated: also values whose raw bits say that they are escapes become ESCAPE
    mu,
    scale,
    offsets,
    raw_bits,  # [parts, rows] int32
    escapes,  # [parts, rows] int32, set
    bad,  # [parts, rows] int32, set: whether a value is none
    values,  # [rows, width] int16, set but where escapes are
    part: "i32",  # noqa: F821
    rows: "i32",  # noqa: F821
    blocks: "i32",  # noqa: F821
    width,
    TILE: tl.constexpr,
):
    """Grid (rows,): bins and raw bits to values."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    part = part.to(tl.int64)
    block = tl.load(block_of + row)
    section = sections + (part * blocks + block) * SECTION_COLUMNS
    raw = payload + tl.load(section + RAW)
    raw_bytes = tl.load(section + RAW_BYTES)
    done = before_in_block(raw_bits + part * rows, tl.load(firsts + block), row, AHEAD)
    symbols += row * width
    mu += row * width
    values += row * width
    offset = tl.load(offsets + part * rows + row)
    found = tl.zeros((TILE,), tl.int32)
    wrong = tl.zeros((TILE,), tl.int32)
    at = 0
    while at < width:
        column = at + lane
        inside = column < width
        symbol, i, linear, _quarter, _predicted = _bins_of(symbols, mu, scale, column, inside, offset)
        index = tl.where(i < 0, -1 - i, i)
        far = symbol == ESCAPE
        count = tl.where(inside & ~far, raw_count(index), 0)
        bit = done + tl.cumsum(count, axis=0) - count
        done += tl.sum(count, axis=0)
        rest = (raw_word(raw, raw_bytes, bit, count > 0) >> (bit & 7)) & ((1 << count) - 1)
        magnitude, escaped = magnitude_of(index, linear, count, rest)
        whole = far | escaped
        wrong |= (inside & ~whole & ((magnitude > 0x7FFF) | (magnitude < 128))).to(tl.int32)
        found += (inside & whole).to(tl.int32)
        value = (magnitude & 0x7FFF) | tl.where(i < 0, 0x8000, 0)
        tl.store(values + column, value.to(tl.int16), mask=inside)
        tl.store(symbols + column, tl.full((TILE,), ESCAPE, tl.uint8), mask=inside & whole)
        at += TILE
    tl.store(escapes + part * rows + row, tl.sum(found, axis=0))
    tl.store(bad + part * rows + row, tl.max(wrong, axis=0))


@triton.jit(do_not_specialize=["part", "rows", "blocks"])
def finish_kernel(
    payload,
    sections,
    block_of,
    firsts,
    symbols,  # [rows, width] uint8, ESCAPE where a value is one
    escapes,  # [parts, rows] int32
    values,  # [rows, width] int16, mutated: all are right
    places,  # [parts, blocks, PLACE_COLUMNS] int64: where they are also written
    sums,  # [2, parts, rows] int32, of this part are set: of the values, and of the values times 1 + their column
    in_scale,
    to_fixed,
    cos,  # [rows, DIM / 2] int32
    sin,
    inputs,  # [rows, input_stride] int8: columns from `input_column` on are set
    input_stride,
    input_column,
    parts: "i32",  # noqa: F821
    part: "i32",  # noqa: F821
    rows: "i32",  # noqa: F821
    blocks: "i32",  # noqa: F821
    width,
    DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (rows,): escapes to values, all values to where they belong and to inputs of later parts."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    part = part.to(tl.int64)
    block = tl.load(block_of + row)
    first = tl.load(firsts + block)
    section = sections + (part * blocks + block) * SECTION_COLUMNS
    source = payload + tl.load(section + ESCAPES)
    limit = tl.load(section + ESCAPE_COUNT)
    done = before_in_block(escapes + part * rows, first, row, AHEAD)
    place = places + (part * blocks + block) * PLACE_COLUMNS
    target, head_stride = row_of_tensor(place, row - first)
    wanted = tl.where(row - first < tl.load(place + EXIST), width, 0)  # columns
    symbols += row * width
    values += row * width
    plain, weighted = tl.zeros((TILE,), tl.uint32), tl.zeros((TILE,), tl.uint32)
    at = 0
    while at < width:
        column = at + lane
        inside = column < width
        whole = inside & (tl.load(symbols + column, mask=inside, other=0).to(tl.int32) == ESCAPE)
        rank = done + tl.cumsum(whole.to(tl.int32), axis=0) - 1
        done = tl.max(rank, axis=0) + 1  # a sum of bits would be counted in local memory
        escaped = escaped_bits(source, rank, whole & (rank < limit))
        x = tl.where(whole, escaped, load_bits(values + column, inside))
        tl.store(values + column, x.to(tl.int16), mask=whole)
        to = target + (column // DIM).to(tl.int64) * head_stride + column % DIM  # `in_heads` takes more registers here
        tl.store(to, x.to(tl.int16), mask=column < wanted)
        plain, weighted = add_to_sums(plain, weighted, x, column, inside)
        at += TILE
    store_sums(sums, plain, weighted, part, row, parts, rows)
    tl.debug_barrier()  # values of other threads are read
    of_inputs = (in_scale, to_fixed, cos, sin, inputs, input_stride, input_column, row)
    make_inputs(values, DIM, width, *of_inputs, DIM, ROTATE, TILE)
