# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""From the values of a part to symbols, and to what symbols leave open: two launches, a program a row.

The first is for one part after the other, since predictions come from the parts before. The second needs no prediction:
it comes when all sizes are known, and writes raw bits and escapes where they belong.
"""

import triton
import triton.language as tl

from kvstore.codecs.predictive.kernels.axis import (
    ESCAPE,
    MOST_RAW,
    OFFSET,
    PLACE_COLUMNS,
    adapt,
    add_to_sums,
    before_in_block,
    bins,
    energy,
    exponent,
    in_heads,
    load_bits,
    make_inputs,
    octaves,
    row_of_tensor,
    signed_index,
    store_sums,
)

AHEAD = tl.constexpr(64)
# Columns of targets `[parts, blocks, TARGET_COLUMNS]` int64: the word that raw bits begin with, the byte that escapes
# do. Negative where a block is not written.
WORDS, ESCAPES = tl.constexpr(0), tl.constexpr(1)
TARGET_COLUMNS = tl.constexpr(2)


@triton.jit
def open_of(x, linear, far):
    """(raw bits, how many, whether the value is an escape), int32 and bool, of bf16 bits."""
    e = exponent(x)
    mantissa = x & 127
    shift = linear - e
    gap = shift - 8
    deep = shift > 7  # as every subnormal value: linear >= 8
    near = (e > 0) & (gap < 7)
    few = tl.minimum(tl.maximum(shift, 0), 7)
    rest = tl.where(deep, tl.where(near, gap | (mantissa << 3), 7), mantissa & ((1 << few) - 1))
    count = tl.where(deep, MOST_RAW, few)
    return tl.where(far, 0, rest), tl.where(far, 0, count), far | (deep & ~near)


@triton.jit
def _symbols_of(x, mu, scale, column, inside, offset):
    """(symbols, their exponents of one value a bin, whether they are escapes, energies) of columns x of a row."""
    predicted = load_bits(mu + column, inside)
    linear, quarter = bins(tl.load(scale + column, mask=inside, other=0), offset)
    distance = signed_index(x, linear) - signed_index(predicted, linear)
    far = (distance < -OFFSET) | (distance >= OFFSET)
    size = tl.where(far, 255, energy(distance, octaves(predicted, linear), quarter))
    return tl.where(far, ESCAPE, distance + OFFSET), linear, far, size


@triton.jit(do_not_specialize=["parts", "part", "rows", "blocks"])
def split_kernel(
    places,  # [parts, blocks, PLACE_COLUMNS] int64: the values
    block_of,  # [rows] int32
    firsts,  # [blocks + 1] int64
    mu,  # [rows, width] int16
    scale,  # [width] int16
    adapts,  # [parts + 1, 3] int32
    offsets,  # [parts + 1, rows] int32: of the next part are set
    fits,  # [parts + 2, rows] int32: of this part are set
    symbols,  # [rows, width] uint8, set
    raw_bits,  # [parts, rows] int32, of this part are set, as the next two
    escapes,  # [parts, rows] int32
    sums,  # [2, parts, rows] int32: of the values, and of the values times 1 + their column
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
    """Grid (rows,): symbols, all totals of a row, and what it gives to later parts."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    part = part.to(tl.int64)
    block = tl.load(block_of + row)
    place = places + (part * blocks + block) * PLACE_COLUMNS
    source, head_stride = row_of_tensor(place, row - tl.load(firsts + block))
    offset = tl.load(offsets + part * rows + row)
    symbols += row * width
    mu += row * width
    counts, sizes, found = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32)
    plain, weighted = tl.zeros((TILE,), tl.uint32), tl.zeros((TILE,), tl.uint32)
    at = 0
    while at < width:
        column = at + lane
        inside = column < width
        x = load_bits(in_heads(source, column, head_stride, DIM), inside)
        symbol, linear, far, size = _symbols_of(x, mu, scale, column, inside, offset)
        tl.store(symbols + column, symbol.to(tl.uint8), mask=inside)
        _rest, count, whole = open_of(x, linear, far)
        counts += tl.where(inside, count, 0)
        sizes += tl.where(inside, size, 0)
        found += (inside & whole).to(tl.int32)
        plain, weighted = add_to_sums(plain, weighted, x, column, inside)
        at += TILE
    tl.store(raw_bits + part * rows + row, tl.sum(counts, axis=0))
    tl.store(escapes + part * rows + row, tl.sum(found, axis=0))
    store_sums(sums, plain, weighted, part, row, parts, rows)
    adapt(tl.sum(sizes, axis=0), width, part, rows, row, adapts, offsets, fits)
    of_inputs = (in_scale, to_fixed, cos, sin, inputs, input_stride, input_column, row)
    make_inputs(source, head_stride, width, *of_inputs, DIM, ROTATE, TILE)


@triton.jit
def add_bits(words, rest, bit, inside, TILE: tl.constexpr):
    """Adds raw bits to words, from bit `bit` on."""
    # Four values have up to 40 bits, which lie in up to three words.
    start = tl.min(tl.reshape(bit, (TILE // 4, 4)), axis=1)
    four = (bit - tl.reshape(tl.broadcast_to(start[:, None], (TILE // 4, 4)), (TILE,))).to(tl.uint64)
    rest = tl.where(inside, rest, 0).to(tl.uint64) << four
    group = tl.sum(tl.reshape(rest, (TILE // 4, 4)), axis=1)
    shift = (start & 31).to(tl.uint64)
    low = group << shift
    high = (group >> 1) >> (63 - shift)
    word = words + (start >> 5)
    _add(word, low & 0xFFFFFFFF)
    _add(word + 1, low >> 32)
    _add(word + 2, high)


@triton.jit
def _add(words, bits):
    tl.atomic_or(words, bits.to(tl.uint32).to(tl.int32, bitcast=True), mask=bits != 0, sem="relaxed")


@triton.jit(do_not_specialize=["part", "rows", "blocks"])
def pack_kernel(
    places,
    block_of,
    firsts,
    symbols,  # [rows, width] uint8
    scale,
    offsets,
    raw_bits,
    escapes,
    targets,  # [parts, blocks, TARGET_COLUMNS] int64
    words,  # int32, zeros: raw bits are added, each part of a block from a word of its own on
    payload,  # bytes: escapes are written
    part: "i32",  # noqa: F821
    rows: "i32",  # noqa: F821
    blocks: "i32",  # noqa: F821
    width,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (rows,). Rows share words, so that bits are added to them; there are none twice, and no order shows."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    part = part.to(tl.int64)
    block = tl.load(block_of + row)
    target = targets + (part * blocks + block) * TARGET_COLUMNS
    words += tl.load(target + WORDS)
    payload += tl.load(target + ESCAPES)
    there = tl.where(tl.load(target + WORDS) >= 0, width, 0)
    first = tl.load(firsts + block)
    source, head_stride = row_of_tensor(places + (part * blocks + block) * PLACE_COLUMNS, row - first)
    offset = tl.load(offsets + part * rows + row)
    bits_before = before_in_block(raw_bits + part * rows, first, row, AHEAD)
    escapes_before = before_in_block(escapes + part * rows, first, row, AHEAD)
    symbols += row * width
    at = 0
    while at < there:
        column = at + lane
        inside = column < there
        x = load_bits(in_heads(source, column, head_stride, DIM), inside)
        linear, _quarter = bins(tl.load(scale + column, mask=inside, other=0), offset)
        far = tl.load(symbols + column, mask=inside, other=0).to(tl.int32) == ESCAPE
        rest, count, whole = open_of(x, linear, far)
        count = tl.where(inside, count, 0)
        whole = inside & whole
        bit = bits_before + tl.cumsum(count, axis=0) - count
        rank = escapes_before + tl.cumsum(whole.to(tl.int32), axis=0) - 1
        bits_before += tl.sum(count, axis=0)
        escapes_before += tl.sum(whole.to(tl.int32), axis=0)
        byte = payload + 2 * rank.to(tl.int64)
        tl.store(byte, (x & 255).to(tl.uint8), mask=whole)
        tl.store(byte + 1, (x >> 8).to(tl.uint8), mask=whole)
        add_bits(words, rest, bit, inside, TILE)
        at += TILE
