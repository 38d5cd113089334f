# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""From the values of a part to symbols, and to what symbols leave open: two launches, a program a row.

The first is for one part after the other, since predictions come from the parts before. The second needs no prediction:
it comes when all sizes are known, and writes raw bits and escapes where they belong.
"""

import triton
import triton.language as tl

from kvstore.codecs.predictive.kernels.axis import (
    ADDRESS,
    ESCAPE,
    HEAD_STRIDE,
    MOST_RAW,
    OFFSET,
    PLACE_COLUMNS,
    TOKEN_STRIDE,
    adapt,
    before_in_block,
    bins,
    energy,
    exponent,
    make_inputs,
    octaves,
    signed_index,
)

AHEAD = tl.constexpr(64)
# Columns of targets `[parts, blocks, TARGET_COLUMNS]` int64: the word that raw bits begin with, the byte that escapes
# do. Negative where a block is not written.
WORDS, ESCAPES = tl.constexpr(0), tl.constexpr(1)
TARGET_COLUMNS = tl.constexpr(2)


@triton.jit
def _open(x, linear, far):
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
    head_stride = tl.load(place + HEAD_STRIDE)
    source = tl.load(place + ADDRESS).to(tl.pointer_type(tl.int16))
    source += (row - tl.load(firsts + block)) * tl.load(place + TOKEN_STRIDE)
    offset = tl.load(offsets + part * rows + row)
    symbols += row * width
    mu += row * width
    counts = tl.zeros((TILE,), tl.int32)
    sizes = tl.zeros((TILE,), tl.int32)
    found = tl.zeros((TILE,), tl.int32)
    plain = tl.zeros((TILE,), tl.uint32)
    weighted = tl.zeros((TILE,), tl.uint32)
    at = 0
    while at < width:
        column = at + lane
        inside = column < width
        of_head = source + (column // DIM).to(tl.int64) * head_stride
        x = tl.load(of_head + column % DIM, mask=inside, other=0).to(tl.int32) & 0xFFFF
        predicted = tl.load(mu + column, mask=inside, other=0).to(tl.int32) & 0xFFFF
        linear, quarter = bins(tl.load(scale + column, mask=inside, other=0), offset)
        distance = signed_index(x, linear) - signed_index(predicted, linear)
        far = (distance < -OFFSET) | (distance >= OFFSET)
        tl.store(symbols + column, tl.where(far, ESCAPE, distance + OFFSET).to(tl.uint8), mask=inside)
        _rest, count, whole = _open(x, linear, far)
        size = energy(distance, octaves(predicted, linear), quarter)
        counts += tl.where(inside, count, 0)
        sizes += tl.where(inside, tl.where(far, 255, size), 0)
        found += (inside & whole).to(tl.int32)
        x = tl.where(inside, x, 0).to(tl.uint32)
        plain += x
        weighted += x * (column + 1).to(tl.uint32)
        at += TILE
    tl.store(raw_bits + part * rows + row, tl.sum(counts, axis=0))
    tl.store(escapes + part * rows + row, tl.sum(found, axis=0))
    tl.store(sums + part * rows + row, tl.sum(plain, axis=0).to(tl.int32, bitcast=True))
    tl.store(sums + (parts + part) * rows + row, tl.sum(weighted, axis=0).to(tl.int32, bitcast=True))
    adapt(tl.sum(sizes, axis=0), width, part, rows, row, adapts, offsets, fits)
    if ROTATE:
        cos += row * (DIM // 2)
        sin += row * (DIM // 2)
    inputs += row * input_stride + input_column
    make_inputs(source, head_stride, width, in_scale, to_fixed, cos, sin, inputs, DIM, ROTATE, TILE)


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
    place = places + (part * blocks + block) * PLACE_COLUMNS
    head_stride = tl.load(place + HEAD_STRIDE)
    first = tl.load(firsts + block)
    source = tl.load(place + ADDRESS).to(tl.pointer_type(tl.int16))
    source += (row - first) * tl.load(place + TOKEN_STRIDE)
    offset = tl.load(offsets + part * rows + row)
    bits_before = before_in_block(raw_bits + part * rows, first, row, AHEAD)
    escapes_before = before_in_block(escapes + part * rows, first, row, AHEAD)
    symbols += row * width
    at = 0
    while at < there:
        column = at + lane
        inside = column < there
        of_head = source + (column // DIM).to(tl.int64) * head_stride
        x = tl.load(of_head + column % DIM, mask=inside, other=0).to(tl.int32) & 0xFFFF
        linear, _quarter = bins(tl.load(scale + column, mask=inside, other=0), offset)
        far = tl.load(symbols + column, mask=inside, other=0).to(tl.int32) == ESCAPE
        rest, count, whole = _open(x, linear, far)
        count = tl.where(inside, count, 0)
        whole = inside & whole
        bit = bits_before + tl.cumsum(count, axis=0) - count
        rank = escapes_before + tl.cumsum(whole.to(tl.int32), axis=0) - 1
        bits_before += tl.sum(count, axis=0)
        escapes_before += tl.sum(whole.to(tl.int32), axis=0)
        byte = payload + 2 * rank.to(tl.int64)
        tl.store(byte, (x & 255).to(tl.uint8), mask=whole)
        tl.store(byte + 1, (x >> 8).to(tl.uint8), mask=whole)

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
        at += TILE


@triton.jit
def _add(words, bits):
    tl.atomic_or(words, bits.to(tl.uint32).to(tl.int32, bitcast=True), mask=bits != 0, sem="relaxed")
